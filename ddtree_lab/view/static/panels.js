// The panels around the tree: what a node is, the rows of the verify pass, the layers, the text.
import { badge, count, h, logText, massText, panel, s, scroller, shorten, term } from "./marks.js";
import { candidates, ownLogProb, placeOf } from "./record.js";
import { massOf } from "./tree.js";

/** The numbers of a round, each with its definition. */
export function figures(view) {
  const { round, walk, budget, definitions } = view;
  const mass = view.curves.mass[budget];
  const left = view.isEdited ? view.states.filter((state) => state !== "pruned").length - 1 : budget;
  const rows = [["drafted", left, "drafted"]];
  if (walk) {
    rows.push(["accepted_drafts", walk.kept.length, "accepted drafts"]);
    rows.push(["emitted_tokens", walk.kept.length + (walk.bonus ? 1 : 0), "emitted tokens"]);
  }
  rows.push(["mass", massText(mass), "drafter expected"], ["past_length", round.past_length, "committed before"]);
  const tiles = rows.map(([key, value, label]) =>
    h("div", { class: `ddt-figure ddt-figure-${key}` }, h("dt", {}, term(definitions, key, label)), h("dd", {}, String(value))),
  );
  return h("dl", { class: "ddt-figures" }, tiles);
}

/** Everything that is known of the selected node. */
export function nodeDetails(view) {
  const { round, node, states, walk, definitions, place } = view;
  if (node < 0) return bonusDetails(view);
  const state = states[node];
  const rows = [
    ["token", [h("code", {}, round.texts[node]), round.ids[node] === null ? "" : ` id ${round.ids[node]}`], "token"],
    ["node, depth, rank", [`${node}, ${round.depths[node]}, `, round.ranks[node] < 0 ? "–" : String(round.ranks[node])], "rank"],
  ];
  if (node) {
    rows.push(["draft log-probability", logText(ownLogProb(round, node)), "step_log_prob"]);
    rows.push(["path log-probability", logText(round.log_probs[node]), "log_prob"]);
    rows.push(["path mass", massText(massOf(round.log_probs[node])), "path_mass"]);
    const own = round.token_target_log_probs?.[node];
    if (own !== null && own !== undefined) rows.push(["target log-probability of it", logText(own), "token_target_log_prob"]);
  }
  const chosen = round.target_texts?.[node];
  if (chosen !== null && chosen !== undefined && view.targets)
    rows.push(["target’s choice after it", [h("code", {}, chosen), ` ${logText(round.target_log_probs?.[node])}`], "target_log_prob"]);
  rows.push(["position id", place.position, "position_id"]);
  rows.push(["mask row sees", `${count(round.past_length, "committed token")}, ${place.sees.length > 1 ? "nodes" : "node"} ${place.sees.join(" ")}`, "mask"]);
  rows.push(["cache slot", `${place.slotBefore} → ${slotAfter(view, place)}`, "cache_slot"]);
  return [
    h("p", { class: "ddt-why" }, badge(state), " ", h("span", {}, view.why)),
    h("dl", { class: "ddt-facts" }, rows.map(([label, value, key]) => [h("dt", {}, term(definitions, key, label)), h("dd", {}, value)])),
    view.targets && topList(round.target_top?.[node], definitions),
  ];
}

function bonusDetails({ walk, round }) {
  const last = walk.path.at(-1);
  return [
    h("p", { class: "ddt-why" }, badge("bonus"), ` Bonus: the target’s own token after “${round.texts[last]}”, where the tree had no such child. It is emitted and becomes the next round’s anchor.`),
    h("dl", { class: "ddt-facts" },
      h("dt", {}, "token"), h("dd", {}, h("code", {}, walk.bonus.text), ` id ${walk.bonus.id}`),
      h("dt", {}, "target log-probability"), h("dd", {}, logText(walk.bonus.logProb)),
      h("dt", {}, "position id"), h("dd", {}, String(round.past_length + walk.path.length)),
      h("dt", {}, "cache slot"), h("dd", {}, "none yet: it is the root of the next round’s tree"),
    ),
    topList(round.target_top?.[last]),
  ];
}

/** The target's favourites at a node, as bars. */
export function topList(top, definitions) {
  if (!top?.length) return null;
  return h("div", { class: "ddt-top" }, h("h3", {}, term(definitions, "target_top", "The target’s favourites there")),
    h("ol", {}, top.map(([, text, logProb]) => h("li", {},
      h("code", {}, text), h("span", { class: "ddt-bar", style: `--p:${massOf(logProb)}` }), h("span", { class: "ddt-num" }, logText(logProb))))));
}

function slotAfter(view, place) {
  if (!view.committed) return "not committed yet";
  return place.slotAfter === null ? "dropped" : String(place.slotAfter);
}

/** Rows of the verify pass: node, position id, mask row and cache slot are one line of one table. */
export function rowsTable(view, nodes) {
  const { round, definitions } = view;
  const n = round.ids.length;
  const cell = n <= 48 ? 4 : Math.max(200 / n, 0.25);
  const head = [["row", "#"], ["token", "token"], ["position_id", "position"], ["cache_slot", "slot"], ["cache_slot", "after"], ["mask", "mask row"]];
  // Rows are boxes of their own, not table rows, so that the browser may leave out those that are not in view.
  const line = (role, attributes, cells) => h("div", { role: "row", ...attributes }, cells.map((content) => h("span", { role }, content)));
  const body = nodes.map((node) => {
    const { position, sees, slotBefore } = placeOf(round, node, []);
    const cells = [String(node), h("code", {}, shorten(round.texts[node], 9)), String(position), String(slotBefore), "", maskStrip(sees, n, cell)];
    return line("cell", { "data-row": node }, cells);
  });
  const width = 290 + 26 + n * cell;
  const table = h("div", { role: "table", "aria-label": "Rows of the verify pass", style: `--cell:${cell}px;min-width:${Math.ceil(width)}px` },
    line("columnheader", { class: "ddt-head" }, head.map(([key, label]) => term(definitions, key, label))), body);
  return scroller(n > 200 ? "rows ddt-many" : "rows", "Rows of the verify pass", table);
}

function maskStrip(sees, n, cell) {
  const wide = Math.max(cell - 1, 1.5);
  const at = (i) => 26 + i * cell;
  return s("svg", { width: 26 + n * cell, height: 14, class: "ddt-strip", "aria-hidden": "true" },
    s("rect", { class: "ddt-past", x: 0, y: 3, width: 20, height: 8 }),
    s("path", { class: "ddt-none", d: `M26 7H${at(n)}` }),
    s("path", { class: "ddt-seen", d: sees.map((i) => `M${at(i)} 3h${wide}v8h${-wide}z`).join("") }));
}

/**
 * Keeps the table's rows up to date: the selected node's, those it sees, those that share its position, and
 * the slots. Only what changes is written, since a table of a thousand rows is slow to lay out.
 */
export function rowsKeeper(box) {
  const rows = new Map([...box.querySelectorAll("[data-row]")].map((row) => [Number(row.dataset.row), row]));
  let lit = new Map();
  return (view) => {
    const { round, node, states, walk, place, committed } = view;
    for (const [i, row] of rows) {
      const index = committed ? walk.path.indexOf(i) : -1;
      const after = index >= 0 ? String(round.past_length + index) : committed ? "·" : "";
      if (row.dataset.state !== states[i]) row.dataset.state = states[i];
      if (row.children[4].textContent !== after) row.children[4].textContent = after;
    }
    const next = new Map();
    const light = (i, name) => rows.has(i) && next.set(i, `${next.get(i) ?? ""} ${name}`);
    if (place) round.depths.forEach((depth, i) => i !== node && depth === round.depths[node] && light(i, "ddt-beside"));
    for (const i of place?.sees ?? []) light(i, i === node ? "ddt-chosen" : "ddt-above");
    for (const i of lit.keys()) if (!next.has(i)) rows.get(i).className = "";
    for (const [i, names] of next) if (lit.get(i) !== names) rows.get(i).className = names;
    lit = next;
    box.firstChild.style.setProperty("--column", String(Math.max(node, 0)));
    const row = rows.get(node);
    if (row) requestAnimationFrame(() => scrollTo(box, row));
  };
}

function scrollTo(box, row) {
  const head = 24; // stays at the top
  if (row.offsetTop < box.scrollTop + head) box.scrollTop = row.offsetTop - head;
  else if (row.offsetTop + row.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = row.offsetTop + row.offsetHeight - box.clientHeight;
}

export const ROLLBACK = {
  crop: ["✂", "crop", "keeps a row per token: rows of the kept path stay, the others are cut off"],
  snapshot: ["⟲", "snapshot", "keeps one running state: it is set to the state after the last committed node"],
  none: ["!", "none", "cannot go back: a rejected branch would stay in it"],
};

/** The layers' caches, by how a rejected branch is undone there. */
export function layersPanel(view) {
  const { layers, node, walk, committed, place } = view;
  if (!layers?.length) return null;
  const kinds = new Map();
  for (const layer of layers) {
    const key = `${layer.kind} ${layer.rollback ?? "none"}`;
    if (!kinds.has(key)) kinds.set(key, []);
    kinds.get(key).push(layer.layer);
  }
  const last = walk?.path.at(-1);
  const fate = (rollback) => {
    if (!committed || node < 0) return "";
    if (rollback === "snapshot") return node === last ? "The state after this node is what stays." : "This node’s state is not kept; the state after the last committed node is.";
    if (rollback !== "crop") return "";
    return place.slotAfter === null ? "This node’s row is dropped." : `This node’s row moves to slot ${place.slotAfter}.`;
  };
  const groups = [...kinds].map(([key, members]) => {
    const [kind, rollback] = key.split(" ");
    const [mark, word, meaning] = ROLLBACK[rollback] ?? ROLLBACK.none;
    return h("div", { class: "ddt-kind", "data-rollback": rollback },
      h("p", {}, h("span", { class: "ddt-rollback" }, h("span", { "aria-hidden": "true" }, `${mark} `), word), " ", h("b", {}, kind.replaceAll("_", " ")), ` ${meaning}.`),
      h("p", { class: "ddt-chips" }, h("span", { class: "ddt-soft" }, members.length > 1 ? "layers " : "layer "), members.map((i) => h("span", { class: "ddt-chip" }, String(i)))),
      h("p", { class: "ddt-fate" }, fate(rollback)));
  });
  return panel("layers", "Layers and their caches", groups);
}

/** The drafter's distributions: one list a depth. */
export function draftPanel(view) {
  const columns = candidates(view.round);
  if (!columns.length) return null;
  const list = columns.map((column, depth) => h("div", { class: "ddt-depth" }, h("h3", {}, `depth ${depth + 1}`),
    h("ol", {}, column.slice(0, 6).map(({ id, text, logProb }) => h("li", { "data-offer": `${depth + 1} ${id}` }, h("code", {}, shorten(text, 10)),
      h("span", { class: "ddt-bar", style: `--p:${massOf(logProb)}` }), h("span", { class: "ddt-num" }, massText(massOf(logProb)))))),
    column.length > 6 && h("p", { class: "ddt-soft" }, `and ${column.length - 6} more in the tree`)));
  return panel("draft", "What the drafter offered",
    h("p", { class: "ddt-note" }, "One pass gives one distribution a depth. No depth knows what another chose; the tree joins them, best path first."),
    scroller("depths", "The drafter’s distributions by depth", list));
}

/** The text so far, each token coloured by where it came from. */
export function textPanel(tokens, view, onGo) {
  const prompt = tokens.filter((token) => token.origin === "prompt").length;
  const spans = tokens.map((token, i) => {
    const isHere = token.round === view.roundIndex;
    const attributes = { class: "ddt-origin", "data-origin": token.origin, "data-depth": Math.min(token.depth, 8), "data-here": isHere ? "yes" : null };
    const shown = [token.text, token.text.includes("↵") && h("br")];
    if (token.round < 0) return h("span", { ...attributes, class: i < prompt ? "ddt-origin ddt-prompt" : "ddt-origin" }, shown);
    const where = token.origin === "bonus" ? "bonus" : `draft, depth ${token.depth}`;
    return h("span", { ...attributes, title: `round ${token.round + 1}: ${where}`, onclick: () => onGo(token) }, shown);
  });
  const key = [["prompt", "prompt"], ["prefill", "prefill"], ["draft", "kept draft, darker the deeper"], ["bonus", "bonus"]];
  return panel("text", "The text so far",
    scroller("words", "The text so far", h("p", {}, spans)),
    h("p", { class: "ddt-key" }, key.map(([origin, words]) => h("span", {}, h("span", { class: "ddt-origin", "data-origin": origin, "data-depth": 3, "aria-hidden": "true" }, origin === "bonus" ? "★" : "a"), ` ${words}`))));
}
