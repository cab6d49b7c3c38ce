// The draft tree as SVG: drawn once for the shown nodes, then only restyled. One tab stop, arrow keys inside.
import { glyph, glyphShape, logText, massText, outline, s, shorten } from "./marks.js";
import { ownLogProb } from "./record.js";
import { layOut, massOf } from "./tree.js";
import { BONUS } from "./words.js";

const SIZES = {
  numbers: { h: 50, dy: 58, least: 132, characters: 12 },
  compact: { h: 24, dy: 30, least: 44, characters: 12 },
};
const GAP = 26; // between columns
const MARGIN = 10;
const LETTER = 7.6; // width of a letter of a token
const LEAST_SCALE = 0.65; // smaller than this nobody can read; the box scrolls instead

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

  /**
   * Draw the shown nodes anew.
   *
   * @param {{under: number, text: string} | null} bonus where the bonus token hangs.
   * @param {"numbers" | "compact"} size
   */
  build(round, { nodes, hidden }, bonus, size) {
    this.round = round;
    this.bonus = bonus;
    this.size = SIZES[size];
    this.isCompact = size === "compact";
    this.layout = { ...layOut(round.parents, nodes, bonus?.under ?? null), extraUnder: bonus?.under ?? null };
    this.items = new Map();
    const shown = bonus ? [...nodes, BONUS] : nodes;
    this.columns = this.columnsOf(shown);
    const edges = s("g", { class: "ddt-edges", "aria-hidden": "true" });
    const items = [];
    for (const node of shown) {
      const { x, y } = this.placeOf(node);
      const parent = node === BONUS ? bonus.under : round.parents[node];
      let edge = null;
      if (parent >= 0) {
        edge = s("path", { class: "ddt-edge", d: this.elbow(parent, node) });
        if (node !== BONUS) edge.style.strokeWidth = (1 + 3.5 * massOf(round.log_probs[node])).toFixed(2);
        edges.append(edge);
      }
      const item = this.item(node, hidden.get(node) ?? 0);
      item.setAttribute("transform", `translate(${x} ${y})`);
      this.items.set(node, { item, edge });
      items.push(item);
    }
    const { x, w } = this.columns.at(-1);
    this.width = x + w + MARGIN + (hidden.size ? 24 : 0);
    this.height = this.layout.rows * this.size.dy - (this.size.dy - this.size.h) + 2 * MARGIN;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren(edges, ...items);
  }

  /** Place and width of every column: as wide as its longest text. */
  columnsOf(shown) {
    const letters = new Array(this.layout.columns).fill(0);
    for (const node of shown) {
      const text = node === BONUS ? this.bonus.text : this.round.texts[node];
      const column = this.layout.x.get(node);
      letters[column] = Math.max(letters[column], Math.min([...text].length, this.size.characters));
    }
    let x = MARGIN;
    return letters.map((most) => {
      const column = { x, w: Math.max(this.size.least, 36 + LETTER * most) };
      x += column.w + GAP;
      return column;
    });
  }

  /** Scale the picture to a width, within what can be read. */
  fit(width) {
    this.scale = Math.min(1, Math.max(LEAST_SCALE, width / this.width));
    this.svg.setAttribute("width", Math.floor(this.width * this.scale));
    this.svg.setAttribute("height", Math.floor(this.height * this.scale));
  }

  /** Corner and width of a node. */
  placeOf(node) {
    const { x, w } = this.columns[this.layout.x.get(node)];
    return { x, w, y: MARGIN + this.layout.y.get(node) * this.size.dy };
  }

  elbow(parent, node) {
    const { h } = this.size;
    const [from, to] = [this.placeOf(parent), this.placeOf(node)];
    const [start, y0, y1, bend] = [from.x + from.w, from.y + h / 2, to.y + h / 2, from.x + from.w + GAP / 2];
    if (y0 === y1) return `M${start} ${y0}H${to.x}`;
    return `M${start} ${y0}H${bend - 6}Q${bend} ${y0} ${bend} ${y0 + 6}V${y1 - 6}Q${bend} ${y1} ${bend + 6} ${y1}H${to.x}`;
  }

  item(node, hiddenBelow) {
    const { h, characters } = this.size;
    const { w } = this.placeOf(node);
    const { round, isCompact } = this;
    const isBonus = node === BONUS;
    const text = isBonus ? "" : round.texts[node];
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
   *   isChosen: (node: number) => boolean, label: (node: number) => string}} view
   */
  restyle(view) {
    const { h } = this.size;
    this.svg.dataset.built = view.built ? "yes" : "no";
    for (const [node, { item, edge }] of this.items) {
      const state = node === BONUS ? view.bonusState : view.states[node];
      if (item.dataset.state !== state) {
        item.dataset.state = state;
        item.querySelector(".ddt-shape").setAttribute("d", outline(state, this.placeOf(node).w, h));
        const mark = glyphShape(state);
        const path = item.querySelector(".ddt-glyph");
        for (const name of Object.keys(mark)) path.setAttribute(name, mark[name]);
      }
      if (edge && edge.dataset.state !== state) edge.dataset.state = state;
      if (edge) edge.dataset.chosen = view.isChosen(node) ? "yes" : "no";
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
    const place = this.placeOf(node);
    const [x, y, w, h] = [place.x, place.y, place.w, this.size.h].map((value) => value * this.scale);
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
