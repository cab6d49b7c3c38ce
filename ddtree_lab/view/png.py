"""SVG to PNG, by whatever converter is there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60


def convert(svg: str, scale: int = 2) -> bytes:
    """A PNG of an SVG whose colours are fixed.

    Args:
        scale: pixels for each unit of the SVG.

    Raises:
        RuntimeError: there is no converter, with what to install.
    """
    if importlib.util.find_spec("resvg_py"):
        import resvg_py

        return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=scale))
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise RuntimeError(
            "no converter from SVG to PNG is installed: pip install resvg-py (part of ddtree-lab[notebook]), or use "
            "save_svg."
        )
    return _by_browser(browser, svg, scale)


def _by_browser(browser: str, svg: str, scale: int) -> bytes:
    size = re.search(r'width="([\d.]+)" height="([\d.]+)"', svg)
    width, height = (round(float(number)) for number in size.groups()) if size else (800, 600)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "picture.svg", Path(folder) / "picture.png"
        source.write_text(svg, encoding="utf-8")
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--window-size={width},{height}",
        ]
        command += [f"--force-device-scale-factor={scale}", f"--screenshot={target}", source.as_uri()]
        subprocess.run(command, capture_output=True, timeout=SECONDS, check=True, cwd=folder)
        return target.read_bytes()
