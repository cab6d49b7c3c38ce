// The two other pages: where two runs part, and the doctor's leak matrix.
import { count, h, panel, scroller, shorten, term } from "./marks.js";
import { topList } from "./panels.js";
import { alignRuns } from "./record.js";
import { sheetPanels } from "./sheets.js";

/**
 * Two runs side by side to their first difference.
 *
 * @param {(run: object, round: number, parent: HTMLElement) => void} openRun draws a whole run, when it is asked for.
 */
export function diffPage(payload, openRun) {
  const { a, b, divergence, definitions } = payload;
  const aligned = alignRuns(a, b);
  const index = divergence?.index ?? aligned.common;
  const sides = [["first run", a, aligned.left, divergence?.a, divergence?.round_a], ["second run", b, aligned.right, divergence?.b, divergence?.round_b]];
  const verdict = divergence
    ? `The first ${count(index, "new token")} agree; then the first run has “${divergence.a.text}” and the second “${divergence.b.text}”.`
    : `All ${count(aligned.common, "new token")} agree.`;
  return h("div", { class: "ddt-page" },
    h("div", { class: "ddt-header" }, h("h1", { class: "ddt-title" }, payload.title), h("p", { class: "ddt-verdict" }, verdict),
      divergence && gapLine(divergence, definitions)),
    h("div", { class: "ddt-sides" }, sides.map(([name, run, tokens, choice, round]) => side(name, run, tokens, index, choice, round ?? 0, definitions, openRun))));
}

function gapLine({ gap }, definitions) {
  if (gap === null || gap === undefined) return h("p", { class: "ddt-note" }, "How close the choice was is not recorded in these traces.");
  const close = gap < 1e-3 ? ": close enough for rounding to decide" : "";
  return h("p", { class: "ddt-note" }, term(definitions, "gap", "Gap there"), ` between the target’s first two choices: ${gap < 0.01 ? gap.toPrecision(2) : gap.toFixed(2)}${close}.`);
}

function side(name, run, tokens, index, choice, round, definitions, openRun) {
  let lastRound = null;
  const spans = tokens.map((token, i) => {
    const begins = token.round !== lastRound && token.round >= 0;
    lastRound = token.round;
    const kind = i < index ? "same" : i === index ? "first" : "after";
    return [begins && h("span", { class: "ddt-round", title: `round ${token.round + 1}` }, `│${token.round + 1} `),
      h(kind === "first" ? "mark" : "span", { class: "ddt-origin", "data-origin": token.origin, "data-depth": Math.min(token.depth, 8), "data-kind": kind }, token.text)];
  });
  const ended = choice && choice.id === null && h("mark", {}, "the text has ended");
  const settings = Object.entries(run.settings ?? {}).filter(([, value]) => value !== null);
  const opener = h("details", { class: "ddt-more-run" }, h("summary", {}, divergence(choice, round)));
  opener.addEventListener("toggle", () => {
    if (opener.open && !opener.querySelector(".ddt-run")) openRun(run, round, opener);
  });
  return panel("side", `${name}: ${run.title}`,
    h("p", { class: "ddt-note" }, settings.map(([key, value]) => `${key.replaceAll("_", " ")} ${value}`).join(" · ")),
    scroller("words", `Text of the ${name}`, h("p", {}, spans, ended)),
    topList(choice?.top, definitions), opener);
}

function divergence(choice, round) {
  return choice ? `Its round ${round + 1}, where they part` : "Its rounds";
}

/** How far each node moves in each layer: layers × nodes, a number and a shade in every cell. */
export function leaksPage(payload) {
  const { layers, nodes, matrix, tolerance, definitions, expected, lead, parts = [] } = payload;
  const moves = matrix.flat().filter((value) => Number.isFinite(value) && value > 0);
  const most = Math.max(...moves, tolerance, 1e-12);
  const shade = (value) => (value <= tolerance ? 0 : Math.max(0.12, Math.sqrt(value / most)));
  const mayMove = new Set(expected ?? []);
  const cell = (value, node) => {
    const state = value === null || !Number.isFinite(value) ? "unknown" : value <= tolerance ? "still" : mayMove.has(node) ? "may" : "moved";
    const words = { unknown: "–", still: "0" }[state] ?? (value < 0.001 ? value.toExponential(0).replace("e-", "e−") : value.toPrecision(2).replace(/^0/, ""));
    return h("td", { "data-moved": state, style: `--p:${shade(value ?? 0)}`, title: `${nodes[node]}: ${value}` }, words);
  };
  const table = h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "layer"), nodes.map((text) => h("th", { scope: "col" }, shorten(text, 10))))),
    h("tbody", {}, matrix.map((row, i) => h("tr", {},
      h("th", { scope: "row" }, String(layers[i].layer), " ", h("span", { class: "ddt-soft" }, layers[i].kind.replaceAll("_", " "))),
      row.map(cell)))));
  const moved = matrix.filter((row) => row.some((value, node) => value > tolerance && !mayMove.has(node))).length;
  const verdict = expected
    ? `${moved ? count(moved, "layer") : "No layer"} of ${layers.length} ${moved === 1 || !moved ? "lets" : "let"} a node move that must not.`
    : `Some node is off in ${moved} of ${count(layers.length, "layer")}.`;
  return h("div", { class: "ddt-page" },
    h("div", { class: "ddt-header" }, h("h1", { class: "ddt-title" }, payload.title), h("p", { class: "ddt-verdict" }, lead ?? verdict)),
    panel("leaks", "Layers × nodes",
      h("p", { class: "ddt-note" }, `${lead ? `${verdict} ` : ""}In the cells: ${definitions?.moved ?? ""}. ${tolerance ? `Up to ${tolerance}` : "0"} is rounding.`),
      scroller("leaks-box", "Layers × nodes", table)),
    sheetPanels(parts, definitions));
}
