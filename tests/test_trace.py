"""Traces survive the disk, and hostile files get one clear error."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import random_pair
from rounds import example_trace, large_round

import ddtree_lab as dl
from ddtree_lab.trace import Trace, files, write_atomically


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
        "import sys; import ddtree_lab as dl; view = dl.view(dl.Trace.load(sys.argv[1]))\n"
        "view.to_text(); view.to_svg(); view.to_html(); view.to_dot(); assert 'torch' not in sys.modules"
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


def first(name: str, value):
    return lambda d: d["rounds"][0].update({name: value})


def entry(name: str, index: int, value):
    return lambda d: d["rounds"][0][name].__setitem__(index, value)


def deep(depth: int) -> list:
    nested: list = []
    for _ in range(depth):
        nested = [nested]
    return nested


DAMAGE = {
    "other format": lambda d: d.update(format="something"),
    "future version": lambda d: d.update(version=99),
    "version of the wrong type": lambda d: d.update(version=[2]),
    "no rounds": lambda d: d.pop("rounds"),
    "rounds no list": lambda d: d.update(rounds={"0": 1}),
    "rounds of the wrong type": lambda d: d.update(rounds=[3]),
    "cycle in parents": entry("parents", 1, 1),
    "parent after its child": entry("parents", 1, 2),
    "parent out of range": entry("parents", 1, -7),
    "parents of numbers that are not whole": entry("parents", 1, 0.5),
    "parents nested": entry("parents", 1, [0]),
    "short log_probs": first("target_log_probs", [0.0]),
    "log_probs as text": entry("log_probs", 1, "0"),
    "log_probs positive": entry("log_probs", 1, 3.0),
    "log_probs too large for a float": entry("log_probs", 1, 10**400),
    "path outside the tree": first("path", [0, 999]),
    "path off the root": first("path", [1]),
    "empty path": first("path", []),
    "token ids as text": first("token_ids", "abc"),
    "a token id that is none": entry("token_ids", 1, -3),
    "a token id beyond 32 bits": entry("token_ids", 1, 2**31),
    "a token id beyond 64 bits": entry("token_ids", 1, 2**80),
    "no node": lambda d: d["rounds"][0].update({key: [] for key in ("token_ids", "parents", "ranks")}),
    "nothing emitted": first("emitted_token_ids", []),
    "ranks too short": first("ranks", [0]),
    "top tokens of different lengths": entry("target_top_ids", 0, [1]),
    "top tokens deep": first("target_top_ids", deep(300)),
    "seconds as text": first("stage_seconds", {"draft": "long"}),
    "seconds below zero": first("stage_seconds", {"draft": -1}),
    "past length as text": first("past_length", "7"),
    "settings as a list": lambda d: d.update(settings=[]),
    "settings deep": lambda d: d.update(settings={"a": deep(300)}),
    "texts as a list": lambda d: d.update(token_texts=["a"]),
    "texts of numbers": lambda d: d.update(token_texts={"1": 2}),
    "texts of what is no token": lambda d: d.update(token_texts={"one": "a"}),
    "bytes that are none": lambda d: d.update(token_bytes={"1": "xyz"}),
    "layers as numbers": lambda d: d.update(layers=[1]),
    "pair deep": lambda d: d.update(pair=deep(300)),
    "no prompt": lambda d: d.pop("prompt_token_ids"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_gets_one_clear_error(trace, tmp_path, name):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(damaged(trace, DAMAGE[name])))
    with pytest.raises(ValueError, match=r"bad\.json") as caught:
        Trace.load(path)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        "null",
        "[1]",
        "\x00",
        "NaN",
        "9" * 5000,
        '{"round_trees": []}',
    ],
)
def test_what_is_no_json_trace_is_refused(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json"):
        Trace.load(path)


def test_a_file_of_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(files.MAX_FILE_BYTES + 1)  # takes no room on the disk
    with pytest.raises(ValueError, match=r"huge\.json.*MiB"):
        Trace.load(path)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_are_refused(tmp_path, constant):
    path = tmp_path / "bad.json"
    text = json.dumps(example_trace().to_dict())
    path.write_text(text.replace("-0.693147", constant, 1))
    with pytest.raises(ValueError, match=r"bad\.json"):
        Trace.load(path)


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 7, 40]))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_or_scrambled_anywhere_is_read_or_refused(seed, width):
    text = json.dumps(example_trace().to_dict())
    place = seed % len(text)
    for changed in (
        text[:place],
        text[:place] + text[place + width :],
        text[:place] + "0" + text[place + 1 :],
    ):
        with suppress(ValueError):
            Trace.from_dict(json.loads(changed)).to_dict()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=6,
)
PLACES = [*example_trace().to_dict(), *example_trace().to_dict()["rounds"][0]]


@given(st.sampled_from(PLACES), json_values)
@settings(max_examples=300, deadline=None)
def test_any_value_anywhere_is_read_or_refused_and_what_is_read_can_be_shown(name, value):
    data = json.loads(json.dumps(example_trace().to_dict()))
    (data if name in data else data["rounds"][0])[name] = value
    trace = None
    with suppress(ValueError):
        trace = Trace.from_dict(data)
    if trace is not None:
        view = dl.view(trace)
        assert view.to_text().encode()
        assert view.to_svg().encode()
        assert view.to_html().encode()


def test_half_a_surrogate_pair_does_not_stop_a_file_from_being_written(tmp_path):
    data = example_trace().to_dict()
    data["token_texts"]["1"] = "\ud83d"
    data["settings"]["prompt"] = "\ud83d"
    path = tmp_path / "a.json"
    path.write_text(json.dumps(data))
    trace = Trace.load(path)
    trace.save(path)
    assert "\ufffd" in dl.view(trace).to_text()


def test_traces_of_version_1_are_read(tmp_path):
    trace = Trace.load(Path(__file__).parent / "data" / "trace-v1.json")
    assert [r.num_accepted_drafts for r in trace.rounds] == [7, 7]
    assert trace.rounds[0].target_top_ids is None
    assert trace.layers == ()
    view = dl.view(trace)
    assert "target" in view.to_text()
    assert view.payload["rounds"][0]["target_top"] is None


def test_what_the_target_thought_is_recorded(trace):
    for round_ in trace.rounds:
        n = round_.tree.num_nodes
        assert round_.target_top_ids.shape == round_.target_top_log_probs.shape == (n, 5)
        # Greedy: its choice is the best of the recorded ones.
        assert round_.target_top_ids[:, 0].tolist() == list(round_.target_token_ids)
        assert round_.target_top_log_probs[:, 0].tolist() == pytest.approx(round_.target_log_probs)
        for node in range(1, n):
            best = dict(zip(round_.target_top_ids[round_.tree.parents[node]].tolist(),
                            round_.target_top_log_probs[round_.tree.parents[node]], strict=True))  # fmt: skip
            found = round_.token_target_log_probs[node]
            assert found == pytest.approx(best.get(int(round_.tree.token_ids[node]), found))
    assert {layer.kind for layer in trace.layers} == {"full_attention", "linear_attention"}


def test_a_session_records_each_round_once(monkeypatch):
    from ddtree_lab import session as module

    session = dl.Session(random_pair(), [1, 2, 3], tree_budget=9, max_new_tokens=15).run()
    made = []
    record = module.record_round
    monkeypatch.setattr(module, "record_round", lambda *args: made.append(args) or record(*args))
    first = session.trace.to_dict()
    assert session.trace.to_dict() == first
    assert len(made) == len(first["rounds"])
    session.back()
    assert len(session.trace.rounds) == len(made) - 1


def test_a_trace_of_a_thousand_rounds_is_compact_and_opens_in_a_few_seconds(tmp_path):
    big = large_round(257)
    n, k = big.tree.num_nodes, 5
    big = replace(big, target_top_ids=np.arange(n * k).reshape(n, k), token_target_log_probs=big.target_log_probs,
                  target_top_log_probs=np.full((n, k), -1.2345))  # fmt: skip
    data = replace(example_trace(), rounds=(big,)).to_dict()
    path = tmp_path / "large.json"
    path.write_text(json.dumps(data | {"rounds": data["rounds"] * 1000}, separators=(",", ":")))
    assert path.stat().st_size < 1000 * n * 120  # bytes a node
    # In a process of its own, as a user does, without the checks of shapes that tests have on; 5 s on an idle core.
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    export = [sys.executable, "-m", "ddtree_lab", "export", str(path), "--html", str(tmp_path / "large.html")]
    subprocess.run(export, check=True, capture_output=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 15
    assert "round 1 of 1000" in (tmp_path / "large.html").read_text()


def test_a_text_puts_split_characters_together():
    trace = replace(example_trace(), first_token_id=7, token_bytes={7: b"\xe2\x9c", 1: b"\x93"})
    assert trace.text == "✓ sat ran"
