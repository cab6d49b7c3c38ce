"""One place for dependencies, and a wheel that has everything in it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
CONDA_NAMES = {"torch": "pytorch", "graphviz": "python-graphviz"}

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs a checkout")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared() -> dict[str, str]:
    extras = [spec for group in project()["optional-dependencies"].values() for spec in group]
    found = [Requirement(spec) for spec in [*project()["dependencies"], *extras]]
    return {CONDA_NAMES.get(r.name, r.name): str(r.specifier) for r in found if r.name != "ddtree-lab"}


def test_environment_yml_mirrors_pyproject():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    from_pip = next(entry for entry in listed if isinstance(entry, dict))
    listed = [entry for entry in listed if entry is not from_pip] + from_pip["pip"]
    mirrored = {r.name: str(r.specifier) for r in map(Requirement, listed)}
    assert mirrored.pop("python") == project()["requires-python"]
    mirrored.pop("pip")
    assert mirrored == declared()


def test_constraints_pin_every_dependency_inside_its_range():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(r.specifier).startswith("==") for r in pins)
    pinned = {r.name.lower().replace("_", "-"): str(r.specifier)[2:] for r in pins}
    assert pinned["torch"] == "2.13.0"
    names = {torch: name for name, torch in CONDA_NAMES.items()}
    for name, specifier in declared().items():
        name = names.get(name, name)
        assert pinned[name] in Requirement(f"{name}{specifier}").specifier, name


@pytest.mark.slow
def test_the_wheel_brings_the_pair(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "target/model.safetensors",
        "drafter/model.safetensors",
        "prompts.json",
        "target/tokenizer.json",
    ):
        assert f"ddtree_lab/assets/embedded_pair/{name}" in names
    assert not any("training" in name or name.startswith("tests/") for name in names)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    decode = "dl.generate(dl.load_pair(), dl.bundled_prompts()[0], max_new_tokens=4)"
    script = f"import ddtree_lab as dl; print({decode})"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.strip()
