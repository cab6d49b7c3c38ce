"""The viewer's logic: its own tests under node, and the same questions put to Python and to JavaScript."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ddtree_lab.stages.tree import build_tree
from ddtree_lab.stages.walk import walk_tree
from ddtree_lab.view.layout import tidy_rows

ROOT = Path(__file__).parent.parent
STATIC = ROOT / "ddtree_lab/view/static"
NODE = shutil.which("node")

# .ci/run installs node and sets this, so that there a missing one is a failure and not a skip.
needs_node = pytest.mark.skipif(
    NODE is None and not os.environ.get("DDTREE_LAB_NO_SKIP"), reason="needs node (apt install nodejs)"
)


def node(*arguments: str, **options) -> str:
    run = subprocess.run([NODE or "node", *arguments], cwd=ROOT, capture_output=True, text=True, **options)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


@needs_node
def test_the_tests_of_the_viewers_logic_pass():
    files = [str(path) for path in sorted((ROOT / "tests/js").glob("*.test.mjs"))]
    assert len(files) >= 2
    assert re.search(r"^# fail 0$", node("--test", "--test-reporter=tap", *files), re.MULTILINE)


@needs_node
def test_smaller_budgets_are_replayed_as_python_walks_them():
    rng = np.random.default_rng(0)
    rounds, walks = [], []
    for _ in range(20):
        tree = build_tree(rng.normal(size=(5, 12)).astype(np.float32) * 2, int(rng.integers(1, 40)))
        target = rng.integers(0, 12, tree.num_nodes)
        rounds.append(
            dict(
                ids=tree.token_ids.tolist(), parents=tree.parents.tolist(), log_probs=tree.log_probs.tolist(),
                target_ids=target.tolist(), target_texts=[str(token) for token in target],
            )
        )  # fmt: skip
        prefixes = [tree.prefix(budget) for budget in range(tree.num_drafted + 1)]
        cut = [walk_tree(prefix, target[: prefix.num_nodes]) for prefix in prefixes]
        walks.append([[list(w.path), w.bonus_token_id, p.mass] for w, p in zip(cut, prefixes, strict=True)])
    script = f"""
        import {{ replay, curves }} from "{STATIC / "record.js"}";
        const rounds = JSON.parse(await new Response(process.stdin).text());
        const walk = (round, b) => [replay(round, b).path, replay(round, b).bonus.id, curves(round).mass[b]];
        console.log(JSON.stringify(rounds.map((round) => round.ids.map((_, b) => walk(round, b)))));"""
    replayed = json.loads(node("--input-type=module", "--eval", script, input=json.dumps(rounds)))
    for mine, theirs in zip(walks, replayed, strict=True):
        for (path, bonus, mass), (js_path, js_bonus, js_mass) in zip(mine, theirs, strict=True):
            assert (path, bonus) == (js_path, js_bonus)
            assert js_mass == pytest.approx(mass)


@needs_node
def test_nodes_stand_where_the_other_pictures_have_them():
    rng = np.random.default_rng(1)
    trees = [[-1, *(int(rng.integers(0, i)) for i in range(1, int(rng.integers(1, 60))))] for _ in range(40)]
    script = f"""
        import {{ layOut }} from "{STATIC / "tree.js"}";
        const trees = JSON.parse(await new Response(process.stdin).text());
        const rows = ([parents, under]) => {{
            const nodes = parents.map((_, node) => node);
            const {{ y }} = layOut(parents, nodes, under);
            return nodes.map((node) => y.get(node));
        }};
        console.log(JSON.stringify(trees.map(rows)));"""
    asked = [(parents, under) for parents in trees for under in (None, 0, len(parents) - 1)]
    drawn = json.loads(node("--input-type=module", "--eval", script, input=json.dumps(asked)))
    for (parents, under), rows in zip(asked, drawn, strict=True):
        assert tidy_rows(parents, under).tolist() == rows


def bundle() -> str:
    """All modules as one script, as the page has them."""
    names = json.loads((STATIC / "order.json").read_text())
    text = "".join((STATIC / name).read_text(encoding="utf-8") for name in names)
    return re.sub(r'^import [^;]*?from "\./[\w.]+";\n', "", text, flags=re.MULTILINE)


@needs_node
def test_the_modules_are_one_script_without_imports_or_addresses(tmp_path):
    (tmp_path / "bundle.mjs").write_text(bundle(), encoding="utf-8")
    node("--check", str(tmp_path / "bundle.mjs"))  # a name declared twice would be an error
    assert not re.search(r"^import\b|\bimport\(|\brequire\(", bundle(), re.MULTILINE)
    for path in [*STATIC.glob("*.js"), *STATIC.glob("*.css")]:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import|url\(|<canvas|eval\(|innerHTML", text), path.name
        assert not re.search(r"\banimation\b|\btransition\b|@keyframes", text), "nothing moves by itself"
        assert len(text.splitlines()) <= 400, path.name


def test_every_module_is_in_the_order_after_what_it_imports():
    names = json.loads((STATIC / "order.json").read_text())
    assert set(names) == {path.name for path in STATIC.glob("*.js")} - {"host.js"}
    for place, name in enumerate(names):
        wanted = re.findall(r'from "\./([\w.]+)"', (STATIC / name).read_text(encoding="utf-8"))
        assert set(wanted) <= set(names[:place]), name
