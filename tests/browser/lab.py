"""A real JupyterLab on loopback, with the built wheel first on the path: what a notebook's reader sees."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from watching import ROOT, Watch

PANEL = "window.jupyterapp?.shell?.currentWidget"
SESSION = f"{PANEL}?.sessionContext"
FRAME = "iframe.ddtree-lab-frame"


def unpack_wheel(folder: Path) -> Path:
    """Build the wheel and unpack it as pip installs it; the editable checkout comes after it on the path."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(folder / "site"), str(wheel)], check=True, capture_output=True)
    return folder / "site"


@contextmanager
def serving(folder: Path, site: Path) -> Iterator[str]:
    """JupyterLab over a folder, with settings of its own; its address."""
    private = {
        name: str(folder / f".{name}") for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
    }
    settings = dict(
        ip="127.0.0.1", port="0", token="", password="", open_browser="False", allow_root="True",
        root_dir=str(folder), disable_check_xsrf="True",
    )  # fmt: skip
    options = [f"--ServerApp.{key}={value}" for key, value in settings.items()]
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--LabApp.expose_app_in_browser=True",
        "--no-browser",
        *options,
    ]
    environment = {
        **os.environ,
        **private,
        "PYTHONPATH": str(site),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield _address(folder / "log", server)
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()


def _address(log: Path, server: subprocess.Popen) -> str:
    for _ in range(300):
        found = re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())
        if found:
            return found.group(0)
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def write_notebook(path: Path, cells: list[str]) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


class Lab:
    """A JupyterLab page with one notebook open."""

    def __init__(self, browser, base: str, notebook: str, **context) -> None:
        self.base = base
        self.context = browser.new_context(viewport={"width": 1400, "height": 1000}, **context)
        self.page = self.context.new_page()
        self.watch = Watch(self.page, allowed=base)
        self.notebook = notebook

    def open(self) -> Lab:
        self.page.goto(f"{self.base}lab/tree/{self.notebook}?reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60000)
        return self

    def command(self, name: str, **arguments) -> None:
        execute = "([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => null)"
        self.page.evaluate(execute, [name, arguments])

    def ready(self) -> None:
        """Wait until the kernel answers; what is run before that is lost."""
        self.page.wait_for_function(
            f"{SESSION}?.session?.kernel?.connectionStatus === 'connected'", timeout=60000
        )
        self.page.evaluate(f"{SESSION}.session.kernel.info.then(() => null)")
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=60000)

    def theme(self, name: str) -> None:
        """Light or Dark."""
        self.command("apputils:change-theme", theme=f"JupyterLab {name}")
        self.page.wait_for_function(f"document.body.dataset.jpThemeName === 'JupyterLab {name}'")

    def shut_down_kernel(self) -> None:
        self.page.evaluate(f"{SESSION}.shutdown().then(() => null)")

    def run_all(self) -> Lab:
        self.ready()
        self.command("notebook:run-all-cells")
        return self

    def view(self, index: int):
        """The frame of the view with that number, drawn."""
        frame = self.page.locator(FRAME).nth(index)
        frame.wait_for(timeout=60000)
        inner = frame.element_handle().content_frame()
        inner.wait_for_selector(".ddt-header", timeout=30000)
        return inner

    def close(self) -> None:
        self.context.close()
