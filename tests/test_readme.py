"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddtree_lab.cli import COMMANDS, make_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_python_runs_from_top_to_bottom(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "19, 21 and 23" in out
    assert "linear_attention" in out


@pytest.mark.parametrize("line", re.findall(r"^ddtree-lab (.+?)(?:  +#.*)?$", README, re.MULTILINE))
def test_every_command_line_is_understood(line):
    import shlex

    assert make_parser().parse_args(shlex.split(line)).command == line.split()[0]


def test_every_file_it_names_exists():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert all((ROOT / link).exists() for link in links)
    listing = README.split("## Where things are")[1].split("```")[1]
    modules = re.findall(r"(\w+\.py)\b", listing)
    found = {path.name for path in (ROOT / "ddtree_lab").rglob("*.py")}
    assert len(modules) > 15
    assert set(modules) <= found
    unnamed = {name for name in found if not name.startswith("__")} - set(modules)
    assert unnamed <= {f"{command}.py" for command in COMMANDS}
