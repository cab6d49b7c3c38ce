// The shape of a draft tree: who is above whom, what is shown, where it stands. No DOM in here.
// A tree is its `parents` (root −1, parents before children), so loops over indices replace recursion.

/** Children of every node, in index order (the drafter's best first). */
export function childLists(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  return children;
}

/** The path from the root to a node, both included. */
export function pathTo(parents, node) {
  const path = [];
  for (let i = node; i >= 0; i = parents[i]) path.push(i);
  return path.reverse();
}

/** The probability of a path; an unknown one counts as 0. */
export function massOf(logProb) {
  return logProb === null || logProb === undefined ? 0 : Math.exp(logProb);
}

/** Running sum of path probabilities: entry b is the mass a budget of b captures. */
export function massByBudget(logProbs) {
  let mass = 0;
  return logProbs.map((logProb, node) => (node ? (mass += massOf(logProb)) : 0));
}

/**
 * Which nodes a picture shows: the `cap` most probable paths, whatever `keep` asks for, children of
 * `opened` nodes, and nothing below a `closed` one. What is shown is always a tree.
 *
 * @returns {{nodes: number[], hidden: Map<number, number>}} shown nodes in index order, and how many
 *   nodes are hidden below a shown one.
 */
export function visibleNodes(round, { cap = Infinity, keep = [], opened = new Set(), closed = new Set() } = {}) {
  const { parents, log_probs: logProbs } = round;
  const shown = new Uint8Array(parents.length);
  const add = (node) => {
    for (let i = node; i >= 0 && !shown[i]; i = parents[i]) shown[i] = 1;
  };
  const order = parents.map((_, node) => node);
  if (cap < order.length) order.sort((a, b) => massOf(logProbs[b]) - massOf(logProbs[a]) || a - b);
  order.slice(0, Math.max(1, cap)).forEach(add);
  keep.forEach(add);
  parents.forEach((parent, node) => opened.has(parent) && add(node));

  const nodes = [];
  const hidden = new Map();
  const home = new Int32Array(parents.length); // nearest shown node at or above
  parents.forEach((parent, node) => {
    const above = node ? home[parent] : 0;
    const isShown = shown[node] && (node === 0 || (above === parent && !closed.has(parent)));
    home[node] = isShown ? node : above;
    if (isShown) nodes.push(node);
    else hidden.set(above, (hidden.get(above) ?? 0) + 1);
  });
  return { nodes, hidden };
}

/**
 * Rows and columns of the shown nodes. A node stands in the row of its first child, so the best path
 * runs straight; later siblings are moved down just below what is already placed at each depth.
 * Elbow edges then never cross, and the height is about that of the widest depth.
 *
 * @param {number[]} nodes shown nodes in index order, the root first.
 * @param {number | null} extraUnder a node that has one more, first child: the bonus token (key −1).
 * @returns {{x: Map<number, number>, y: Map<number, number>, columns: number, rows: number}}
 */
export function layOut(parents, nodes, extraUnder = null) {
  const children = new Map(nodes.map((node) => [node, []]));
  for (const node of nodes) if (parents[node] >= 0) children.get(parents[node]).push(node);
  const items = [...nodes];
  if (extraUnder !== null) {
    children.get(extraUnder).unshift(-1);
    children.set(-1, []);
    items.push(-1);
  }
  const offset = new Map([[0, 0]]); // row below the parent's
  const shapes = new Map(); // first and last row a subtree takes at each depth below its root
  for (let k = items.length - 1; k >= 0; k--) {
    const first = [0];
    const last = [0];
    for (const child of children.get(items[k])) {
      const shape = shapes.get(child);
      let down = 0;
      shape.first.forEach((row, depth) => {
        if (depth + 1 < last.length) down = Math.max(down, last[depth + 1] + 1 - row);
      });
      shape.first.forEach((row, depth) => {
        first[depth + 1] ??= row + down;
        last[depth + 1] = shape.last[depth] + down;
      });
      offset.set(child, down);
      shapes.delete(child);
    }
    shapes.set(items[k], { first, last });
  }
  const x = new Map([[0, 0]]);
  const y = new Map([[0, 0]]);
  const place = (node, parent) => {
    x.set(node, x.get(parent) + 1);
    y.set(node, y.get(parent) + offset.get(node));
  };
  for (const node of nodes) if (parents[node] >= 0) place(node, parents[node]);
  if (extraUnder !== null) place(-1, extraUnder);
  return { x, y, columns: Math.max(...x.values()) + 1, rows: Math.max(...y.values()) + 1 };
}

/**
 * The node an arrow key leads to: left parent, right first child, up and down the sibling or, where
 * there is none, the next node at the same depth.
 */
export function neighbour(parents, layout, node, key, end = 0) {
  const { x, y } = layout;
  const parentOf = (i) => (i === -1 ? layout.extraUnder : parents[i]);
  if (key === "Home") return 0;
  if (key === "End") return end;
  if (key === "ArrowLeft") return node === 0 ? 0 : parentOf(node);
  const column = x.get(node) + (key === "ArrowRight" ? 1 : 0);
  const rows = [...x.keys()].filter((i) => x.get(i) === column).sort((a, b) => y.get(a) - y.get(b));
  if (key === "ArrowRight") return rows.find((i) => parentOf(i) === node) ?? node;
  const place = rows.indexOf(node) + (key === "ArrowUp" ? -1 : 1);
  return rows[place] ?? node;
}

/** Nodes whose text contains the query; `#7` is node 7. A typed space finds the visible ␣. */
export function search(texts, query) {
  if (!query) return [];
  const number = /^#(\d+)$/.exec(query);
  if (number) return Number(number[1]) < texts.length ? [Number(number[1])] : [];
  const wanted = query.toLowerCase().replaceAll(" ", "␣");
  return texts.flatMap((text, node) => (text.toLowerCase().includes(wanted) ? [node] : []));
}
