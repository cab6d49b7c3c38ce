// Records that are no tree: tables whose cells have marks, bars and badges. What is in them was settled in Python.
import { badge, h, panel, scroller, term } from "./marks.js";
import { ROLLBACK } from "./panels.js";

const SEEN = { self: "●", ancestor: "○", hidden: "·" };

/** A page of tables. */
export function sheetPage({ title, lead, parts, definitions }) {
  return h("div", { class: "ddt-page" },
    h("div", { class: "ddt-header" }, h("h1", { class: "ddt-title" }, title), h("p", { class: "ddt-verdict" }, lead)),
    sheetPanels(parts, definitions));
}

/** A panel for each table. */
export function sheetPanels(parts, definitions) {
  return parts.map((part) => panel("sheet", part.title,
    scroller("sheet-box", part.title, sheetTable(part, definitions)), part.note && h("p", { class: "ddt-note" }, part.note)));
}

function sheetTable({ title, columns, rows }, definitions) {
  const table = h("table", { "aria-label": title },
    h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col", "data-square": /^\d+$/.test(name) }, term(definitions, name.replace(/^rank \d+$/, "rank"), name))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, row.head)), row.cells.map(sheetCell)))));
  table.addEventListener("pointerover", ({ target }) => light(table, target.closest("td")));
  table.addEventListener("pointerleave", () => light(table, null));
  return table;
}

function sheetCell({ text, prose, number, share, state, rollback, seen, tip }) {
  if (seen) return h("td", { title: tip, "data-seen": seen }, h("span", { "aria-hidden": "true" }, SEEN[seen]), h("span", { class: "ddt-hidden" }, tip));
  if (rollback) return h("td", { title: tip, "data-rollback": rollback }, h("span", { class: "ddt-rollback" }, h("span", { "aria-hidden": "true" }, `${ROLLBACK[rollback][0]} `), text));
  if (prose) return h("td", { class: "ddt-prose" }, text);
  return h("td", { title: tip },
    state ? badge(state, h("code", {}, text)) : h("code", {}, text),
    number && h("span", { class: "ddt-soft ddt-num" }, ` ${number}`),
    share !== undefined && h("span", { class: "ddt-bar", style: `--p:${share}` }));
}

/** Row and column of a mask under the pointer. */
function light(table, cell) {
  const column = cell?.dataset.seen ? cell.cellIndex : -1;
  for (const row of table.rows) for (const one of row.cells) one.classList.toggle("ddt-crossed", one.cellIndex === column || (column >= 0 && row === cell.parentElement));
}
