import os

import pytest
import torch
from checks import LARGEST_ERRORS
from hypothesis import settings

# The same examples on every machine and run: a failure is found again by running the test again.
settings.register_profile("lab", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("lab")
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items):
    """The doctor's matrix first: it takes minutes on one core, during which the other workers do the rest."""
    items.sort(key=lambda item: "test_doctor_matrix" not in item.nodeid)


def pytest_sessionfinish(session):
    """A worker of pytest-xdist hands its errors to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["largest_errors"] = LARGEST_ERRORS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for label, largest in getattr(node, "workeroutput", {}).get("largest_errors", {}).items():
        LARGEST_ERRORS[label] = max(largest, LARGEST_ERRORS.get(label, 0.0))


def pytest_terminal_summary(terminalreporter):
    """What exact meant in this run: the largest difference seen for each class of models."""
    if LARGEST_ERRORS:
        terminalreporter.section("largest errors, on logits of standard deviation 10")
        for label, error in sorted(LARGEST_ERRORS.items()):
            terminalreporter.line(f"{error:8.1e}  {label}")
