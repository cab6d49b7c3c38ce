"""A Chromium, and pages made by the package itself. Screenshots go to .test-output/ to be looked at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import unpack_wheel
from watching import PROMPT, ROOT

import ddtree_lab as dl

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator:
    # .ci/run sets this, so that there a browser that is missing is a failure and not a skip.
    if CHROMIUM is None and not os.environ.get("DDTREE_LAB_NO_SKIP"):
        pytest.skip("needs Chromium (apt install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The built wheel, unpacked: first on the path of what a JupyterLab runs."""
    return unpack_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def pair() -> dl.Pair:
    return dl.load_pair()


@pytest.fixture(scope="session")
def trace(pair) -> dl.Trace:
    """A recorded run of the embedded pair; some rounds keep many drafts, some none."""
    return dl.generate(pair, PROMPT, tree_budget=32, max_new_tokens=80, record=True).trace


@pytest.fixture(scope="session")
def other_trace(pair) -> dl.Trace:
    """The same prompt, sampled: its text leaves the first one's."""
    return dl.generate(
        pair, PROMPT, tree_budget=16, max_new_tokens=40, temperature=1.0, seed=3, record=True
    ).trace


@pytest.fixture(scope="session")
def screenshots() -> Path:
    folder = ROOT / ".test-output" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
