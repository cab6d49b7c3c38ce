"""Traces survive the disk, and hostile files get one clear error."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pairs import random_pair

import ddtree_lab as dl
from ddtree_lab.trace import Trace, write_atomically


@pytest.fixture(scope="module")
def trace() -> dl.Trace:
    return dl.generate(random_pair(), [1, 2, 3], tree_budget=9, max_new_tokens=15, record=True).trace


def test_round_trip(trace, tmp_path):
    path = tmp_path / "a.json"
    trace.save(path)
    loaded = Trace.load(path)
    assert loaded.to_dict() == trace.to_dict()
    assert loaded.token_ids == trace.token_ids
    assert [r.num_accepted_drafts for r in loaded.rounds] == [r.num_accepted_drafts for r in trace.rounds]


def test_loading_needs_no_torch(trace, tmp_path):
    trace.save(tmp_path / "a.json")
    script = (
        "import sys; from ddtree_lab.trace import Trace; from ddtree_lab.view.text import draw_round\n"
        "t = Trace.load(sys.argv[1]); draw_round(t.rounds[0], t.text_of); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "a.json"], check=True)
    assert (tmp_path / "a.json").stat().st_size > 0


def test_importing_the_package_needs_no_torch():
    script = "import sys, ddtree_lab; assert 'torch' not in sys.modules; print(len(dir(ddtree_lab)))"
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(out.stdout) > 20


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")
    monkeypatch.setattr(
        "os.fdopen", lambda *a, **k: (_ for _ in ()).throw(OSError("No space left on device"))
    )
    with pytest.raises(OSError, match="space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def damaged(trace: dl.Trace, change) -> dict:
    data = json.loads(json.dumps(trace.to_dict()))
    change(data)
    return data


DAMAGE = {
    "other format": lambda d: d.update(format="something"),
    "future version": lambda d: d.update(version=99),
    "no rounds": lambda d: d.pop("rounds"),
    "rounds of the wrong type": lambda d: d.update(rounds=[3]),
    "cycle in parents": lambda d: d["rounds"][0]["parents"].__setitem__(1, 1),
    "parent out of range": lambda d: d["rounds"][0]["parents"].__setitem__(1, -7),
    "short log_probs": lambda d: d["rounds"][0].update(target_log_probs=[0.0]),
    "path outside the tree": lambda d: d["rounds"][0].update(path=[0, 999]),
    "empty path": lambda d: d["rounds"][0].update(path=[]),
    "token ids as text": lambda d: d["rounds"][0].update(token_ids="abc"),
    "nothing emitted": lambda d: d["rounds"][0].update(emitted_token_ids=[]),
    "ranks too short": lambda d: d["rounds"][0].update(ranks=[0]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_gets_one_clear_error(trace, tmp_path, name):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(damaged(trace, DAMAGE[name])))
    with pytest.raises(ValueError, match=r"bad\.json"):
        Trace.load(path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "[1]", "\x00"])
def test_what_is_no_json_trace_is_refused(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json"):
        Trace.load(path)
