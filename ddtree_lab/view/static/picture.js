// The draft tree as SVG: drawn once for the shown nodes, then only restyled. One tab stop, arrow keys inside.
import { glyph, glyphShape, logText, massText, outline, s, shorten } from "./marks.js";
import { ownLogProb } from "./record.js";
import { layOut, massOf } from "./tree.js";
import { BONUS } from "./words.js";

const SIZES = {
  numbers: { w: 136, h: 50, dx: 164, dy: 58, characters: 12 },
  compact: { w: 104, h: 24, dx: 132, dy: 30, characters: 9 },
};
const MARGIN = 10;

export class TreePicture {
  /** @param {(node: number) => void} onSelect @param {(node: number) => void} onToggle opens or closes a node. */
  constructor(onSelect, onToggle) {
    this.svg = s("svg", { class: "ddt-tree", role: "tree", "aria-label": "Draft tree" });
    this.svg.addEventListener("click", (event) => {
      const item = event.target.closest("[data-node]");
      if (!item) return;
      if (event.target.closest(".ddt-more")) onToggle(Number(item.dataset.node));
      else onSelect(Number(item.dataset.node));
    });
    this.svg.addEventListener("focusin", (event) => {
      const item = event.target.closest("[data-node]");
      if (item) onSelect(Number(item.dataset.node));
    });
    this.items = new Map();
  }

  /** Draw the shown nodes anew. */
  build(round, { nodes, hidden }, bonusUnder, size) {
    const { w, h, dx, dy } = (this.size = SIZES[size]);
    this.round = round;
    this.layout = { ...layOut(round.parents, nodes, bonusUnder), extraUnder: bonusUnder };
    this.items = new Map();
    const edges = s("g", { class: "ddt-edges", "aria-hidden": "true" });
    const items = [];
    for (const node of bonusUnder === null ? nodes : [...nodes, BONUS]) {
      const [x, y] = this.placeOf(node);
      const parent = node === BONUS ? bonusUnder : round.parents[node];
      let edge = null;
      if (parent >= 0) {
        edge = s("path", { class: "ddt-edge", d: this.elbow(parent, node) });
        if (node !== BONUS) edge.style.strokeWidth = (1 + 3.5 * massOf(round.log_probs[node])).toFixed(2);
        edges.append(edge);
      }
      const item = this.item(node, hidden.get(node) ?? 0, size);
      item.setAttribute("transform", `translate(${x} ${y})`);
      this.items.set(node, { item, edge });
      items.push(item);
    }
    const width = this.layout.columns * dx - (dx - w) + 2 * MARGIN + (hidden.size ? 30 : 0);
    const height = this.layout.rows * dy - (dy - h) + 2 * MARGIN;
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }))
      this.svg.setAttribute(name, value);
    this.svg.replaceChildren(edges, ...items);
  }

  placeOf(node) {
    return [MARGIN + this.layout.x.get(node) * this.size.dx, MARGIN + this.layout.y.get(node) * this.size.dy];
  }

  elbow(parent, node) {
    const { w, h, dx } = this.size;
    const [x0, y0] = this.placeOf(parent);
    const [x1, y1] = this.placeOf(node);
    const [from, to, bend] = [y0 + h / 2, y1 + h / 2, x0 + w + (dx - w) / 2];
    if (from === to) return `M${x0 + w} ${from}H${x1}`;
    return `M${x0 + w} ${from}H${bend - 6}Q${bend} ${from} ${bend} ${from + 6}V${to - 6}Q${bend} ${to} ${bend + 6} ${to}H${x1}`;
  }

  item(node, hiddenBelow, size) {
    const { w, h, characters } = this.size;
    const { round } = this;
    const isBonus = node === BONUS;
    const text = isBonus ? "" : round.texts[node];
    const isCompact = size === "compact";
    const baseline = isCompact ? h / 2 + 4.5 : 16;
    const parts = [
      s("path", { class: "ddt-ring", d: outline("rejected", w + 8, h + 8), transform: "translate(-4 -4)" }),
      s("path", { class: "ddt-shape" }),
      glyph("drafted", 9, isCompact ? h / 2 - 6 : 5.5),
      s("text", { class: "ddt-token", x: 26, y: baseline }, shorten(text, characters)),
    ];
    if (!isBonus) {
      const mass = massOf(round.log_probs[node]);
      if (node) parts.push(s("rect", { class: "ddt-mass", x: 8, y: h - 4, width: Math.max(1, mass * (w - 16)), height: 2 }));
      if (!isCompact) {
        const own = node ? `${logText(ownLogProb(round, node))} · ${massText(mass)}` : `position ${round.past_length}`;
        parts.push(s("text", { class: "ddt-number", x: 10, y: 29 }, own));
        if (round.ranks[node] >= 0) parts.push(s("text", { class: "ddt-number", x: w - 9, y: 29, "text-anchor": "end" }, `rank ${round.ranks[node]}`));
      }
    }
    if (!isCompact) parts.push(s("text", { class: "ddt-target", x: 10, y: isBonus ? 29 : 41 }));
    if (hiddenBelow) parts.push(more(w, h, hiddenBelow));
    return s(
      "g",
      {
        class: "ddt-node", role: "treeitem", tabindex: "-1", "data-node": node,
        "aria-level": (isBonus ? this.layout.x.get(BONUS) : round.depths[node]) + 1,
        "aria-expanded": hiddenBelow ? "false" : null,
      },
      parts,
    );
  }

  /**
   * Bring states up to date, without drawing anew.
   *
   * @param {{states: string[], bonus: object | null, bonusState: string, targets: boolean, built: boolean,
   *   label: (node: number) => string}} view
   */
  restyle(view) {
    const { w, h } = this.size;
    this.svg.dataset.built = view.built ? "yes" : "no";
    for (const [node, { item, edge }] of this.items) {
      const state = node === BONUS ? view.bonusState : view.states[node];
      if (item.dataset.state !== state) {
        item.dataset.state = state;
        item.querySelector(".ddt-shape").setAttribute("d", outline(state, w, h));
        const mark = glyphShape(state);
        const path = item.querySelector(".ddt-glyph");
        for (const name of Object.keys(mark)) path.setAttribute(name, mark[name]);
      }
      if (edge && edge.dataset.state !== state) edge.dataset.state = state;
      if (node === BONUS) {
        item.querySelector(".ddt-token").textContent = shorten(view.bonus?.text, this.size.characters);
        item.style.display = edge.style.display = view.bonus ? "" : "none";
      }
      const target = item.querySelector(".ddt-target");
      const words = view.targets ? this.targetText(node, view.bonus) : "";
      if (target && target.textContent !== words) target.textContent = words;
      const label = view.label(node);
      if (item.getAttribute("aria-label") !== label) item.setAttribute("aria-label", label);
    }
  }

  targetText(node, bonus) {
    if (node === BONUS) return bonus ? `target ${logText(bonus.logProb)}` : "";
    const { target_ids: ids, target_texts: texts, target_log_probs: logProbs } = this.round;
    return ids?.[node] === null || !ids ? "" : `→ ${shorten(texts[node], 10)} ${logText(logProbs?.[node])}`;
  }

  /** Mark the selected node, its path, and where the keyboard is. */
  select(node, path, found = []) {
    for (const item of this.svg.querySelectorAll("[aria-selected=true]")) {
      item.setAttribute("aria-selected", "false");
      item.setAttribute("tabindex", "-1");
    }
    for (const item of this.svg.querySelectorAll(".ddt-above, .ddt-found")) item.classList.remove("ddt-above", "ddt-found");
    for (const above of path) this.items.get(above)?.item.classList.add("ddt-above");
    for (const hit of found) this.items.get(hit)?.item.classList.add("ddt-found");
    const item = this.items.get(node)?.item ?? this.items.get(0).item;
    item.setAttribute("aria-selected", "true");
    item.setAttribute("tabindex", "0");
    return item;
  }

  /** Put the keyboard on a node and scroll it into its box, not the page. */
  reveal(node, box, { focus = false } = {}) {
    const item = this.items.get(node)?.item;
    if (!item) return;
    if (focus) item.focus({ preventScroll: true });
    const [x, y] = this.placeOf(node);
    const { w, h } = this.size;
    if (x < box.scrollLeft) box.scrollLeft = x - MARGIN;
    else if (x + w > box.scrollLeft + box.clientWidth) box.scrollLeft = x + w + MARGIN - box.clientWidth;
    if (y < box.scrollTop) box.scrollTop = y - MARGIN;
    else if (y + h > box.scrollTop + box.clientHeight) box.scrollTop = y + h + MARGIN - box.clientHeight;
  }
}

/** The tab of a node with hidden ones below it. */
function more(w, h, hidden) {
  const label = `+${hidden}`;
  const width = 8 + 6.5 * label.length;
  return s(
    "g",
    { class: "ddt-more", transform: `translate(${w - 4} ${h / 2 - 8})` },
    s("rect", { width, height: 16, rx: 8 }),
    s("text", { x: width / 2, y: 11.5, "text-anchor": "middle" }, label),
  );
}
