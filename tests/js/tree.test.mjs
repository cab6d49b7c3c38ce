import assert from "node:assert/strict";
import { test } from "node:test";
import * as tree from "../../ddtree_lab/view/static/tree.js";
import { generator, randomRound } from "./random.mjs";

const SEEDS = Array.from({ length: 300 }, (_, seed) => seed);

test("the layout keeps nodes apart, children right of their parents, and edges from crossing", () => {
  for (const seed of SEEDS) {
    const { parents } = randomRound(seed);
    const nodes = parents.map((_, i) => i);
    const under = seed % 3 ? nodes[seed % nodes.length] : null;
    const { x, y, rows, columns } = tree.layOut(parents, nodes, under);
    const all = under === null ? nodes : [...nodes, -1];
    assert.equal(new Set(all.map((i) => `${x.get(i)} ${y.get(i)}`)).size, all.length);
    assert.equal(Math.max(...all.map((i) => y.get(i))) + 1, rows);
    assert.equal(Math.max(...all.map((i) => x.get(i))) + 1, columns);
    const children = tree.childLists(parents);
    for (const i of nodes) {
      const below = i === under ? [-1, ...children[i]] : children[i];
      if (below.length) assert.equal(y.get(below[0]), y.get(i), "a parent stands in the row of its first child");
      for (const child of below) assert.equal(x.get(child), x.get(i) + 1);
      // The elbow of one parent covers the rows of its children; no other elbow at that depth may.
      const span = (j) => [y.get(j), Math.max(...(j === under ? [-1, ...children[j]] : children[j]).map((c) => y.get(c)))];
      for (const j of nodes) {
        const hasChildren = children[j].length || j === under;
        if (j === i || !below.length || !hasChildren || x.get(i) !== x.get(j)) continue;
        const [a, b] = [span(i), span(j)];
        assert.ok(a[1] < b[0] || b[1] < a[0], `seed ${seed}: edges below ${i} and ${j} overlap`);
      }
    }
  }
});

test("a chain is one row and a star one column", () => {
  const chain = tree.layOut([-1, 0, 1, 2], [0, 1, 2, 3], 3);
  assert.deepEqual([chain.rows, chain.columns], [1, 5]);
  const star = tree.layOut([-1, 0, 0, 0], [0, 1, 2, 3]);
  assert.deepEqual([star.rows, star.columns], [3, 2]);
});

test("ten thousand nodes in one chain are laid out without running out of stack", () => {
  const parents = Array.from({ length: 10000 }, (_, i) => i - 1);
  assert.equal(tree.layOut(parents, parents.map((_, i) => i)).columns, 10000);
});

test("what is shown is a tree with the kept nodes, and what is hidden is counted once", () => {
  for (const seed of SEEDS) {
    const round = randomRound(seed);
    const random = generator(seed + 1000);
    const pick = () => new Set(round.ids.map((_, i) => i).filter(() => random() < 0.1));
    const [opened, closed, keep] = [pick(), pick(), [...pick()]];
    const cap = 1 + Math.floor(random() * 12);
    const { nodes, hidden } = tree.visibleNodes(round, { cap, keep, opened, closed });
    const shown = new Set(nodes);
    assert.ok(shown.has(0));
    for (const i of nodes) if (i) assert.ok(shown.has(round.parents[i]) && !closed.has(round.parents[i]));
    const isClosed = (i) => tree.pathTo(round.parents, i).slice(0, -1).some((above) => closed.has(above));
    for (const i of keep) assert.ok(shown.has(i) || isClosed(i));
    assert.equal(nodes.length + [...hidden.values()].reduce((a, b) => a + b, 0), round.ids.length);
    for (const [i, count] of hidden) {
      const below = round.ids.filter((_, j) => {
        const path = tree.pathTo(round.parents, j);
        return !shown.has(j) && path.filter((k) => shown.has(k)).at(-1) === i;
      });
      assert.equal(below.length, count);
    }
  }
});

test("a cap shows the most probable paths", () => {
  const round = { parents: [-1, 0, 0, 1, 2], log_probs: [0, -1, -0.5, -3, -0.6] };
  assert.deepEqual(tree.visibleNodes(round, { cap: 3 }).nodes, [0, 2, 4]);
});

test("arrows: left and right are inverse along first children, up and down within a depth", () => {
  for (const seed of SEEDS) {
    const { parents } = randomRound(seed);
    const nodes = parents.map((_, i) => i);
    const layout = { ...tree.layOut(parents, nodes), extraUnder: null };
    for (const i of nodes) {
      const right = tree.neighbour(parents, layout, i, "ArrowRight");
      if (right !== i) assert.equal(tree.neighbour(parents, layout, right, "ArrowLeft"), i);
      const down = tree.neighbour(parents, layout, i, "ArrowDown");
      assert.equal(layout.x.get(down), layout.x.get(i));
      if (down !== i) assert.equal(tree.neighbour(parents, layout, down, "ArrowUp"), i);
    }
    // Every node can be reached from the root.
    const reached = new Set([0]);
    for (const i of reached)
      for (const key of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"]) reached.add(tree.neighbour(parents, layout, i, key));
    assert.equal(reached.size, nodes.length);
  }
});

test("the bonus token is reached by arrows and left again", () => {
  const parents = [-1, 0, 1];
  const layout = { ...tree.layOut(parents, [0, 1, 2], 1), extraUnder: 1 };
  assert.equal(tree.neighbour(parents, layout, 1, "ArrowRight"), -1);
  assert.equal(tree.neighbour(parents, layout, -1, "ArrowLeft"), 1);
  assert.equal(tree.neighbour(parents, layout, -1, "ArrowDown"), 2);
  assert.equal(tree.neighbour(parents, layout, 2, "Home"), 0);
});

test("search finds text, visible spaces and node numbers", () => {
  const texts = ["␣the", "The", "↵", "x"];
  assert.deepEqual(tree.search(texts, "the"), [0, 1]);
  assert.deepEqual(tree.search(texts, " t"), [0]);
  assert.deepEqual(tree.search(texts, "#3"), [3]);
  assert.deepEqual(tree.search(texts, "#9"), []);
  assert.deepEqual(tree.search(texts, ""), []);
});
