// Small things every panel uses: elements, glyphs, shapes, numbers. Texts only ever become text nodes.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element: `h("p", { class: "note" }, "text", element, …)`. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, the same way. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Every state: its word, its glyph in a 12 × 12 box, whether the glyph is filled, and its meaning. */
export const STATES = {
  root: ["anchor", "M6 .8 11.2 6 6 11.2 .8 6Z", true, "the last token of the text so far; the tree grows from it"],
  drafted: ["drafted", "M6 2.6A3.4 3.4 0 1 1 5.99 2.6Z", false, "proposed by the drafter, not decided yet"],
  accepted: ["kept", "M1.8 6.4 4.8 9.6 10.4 2.6", false, "the target chose the same token"],
  rejected: ["not kept", "M2.6 2.6 9.4 9.4M9.4 2.6 2.6 9.4", false, "the target chose another token here or above"],
  bonus: ["bonus", "M6 .6 7.6 4.2 11.5 4.6 8.6 7.2 9.4 11 6 9 2.6 11 3.4 7.2 .5 4.6 4.4 4.2Z", true, "the target's own token where no draft agrees; it costs nothing"],
  pruned: ["pruned", "M1.5 6H10.5", false, "outside the budget that is shown, or cut by hand"],
  "what-if": ["what if", "M3.6 4C3.7 2.4 4.7 1.5 6.1 1.5 7.5 1.5 8.5 2.5 8.5 3.8 8.5 5.6 6.1 5.8 6.1 7.6M6.1 10V10.4", false, "would be so under the change you made"],
};

/** The mark of a state, drawn at (x, y). */
export function glyph(state, x = 0, y = 0) {
  return s("path", { class: "ddt-glyph", ...glyphShape(state), transform: `translate(${x} ${y})`, "aria-hidden": "true" });
}

export function glyphShape(state) {
  const [, d, filled] = STATES[state];
  return { d, "data-filled": filled ? "yes" : "no" };
}

/** The outline of a node of a state: no two states have the same, so colour is never alone. */
export function outline(state, w, h) {
  const r = { accepted: 7, bonus: h / 2, drafted: 3 }[state];
  if (r) {
    const [a, b] = [w - 2 * r, h - 2 * r];
    return `M${r} 0h${a}a${r} ${r} 0 0 1 ${r} ${r}v${b}a${r} ${r} 0 0 1 ${-r} ${r}h${-a}a${r} ${r} 0 0 1 ${-r} ${-r}v${-b}a${r} ${r} 0 0 1 ${r} ${-r}z`;
  }
  const c = h / 4;
  if (state === "root") return `M${c} 0H${w - c}L${w} ${h / 2} ${w - c} ${h}H${c}L0 ${h / 2}Z`;
  if (state === "pruned") return `M${c} 0H${w - c}L${w} ${c}V${h - c}L${w - c} ${h}H${c}L0 ${h - c}V${c}Z`;
  if (state === "what-if") return `M${c} 0H${w}L${w - c} ${h}H0Z`;
  return `M0 0H${w}V${h}H0Z`;
}

/** A state's mark beside words, as in the legend. */
export function badge(state, ...words) {
  const mark = s("svg", { viewBox: "-6 -3 24 18", class: "ddt-mark", "aria-hidden": "true" });
  mark.append(s("path", { class: "ddt-shape", d: outline(state, 22, 16), transform: "translate(-5 -2)" }), glyph(state));
  return h("span", { class: "ddt-badge", "data-state": state }, mark, words);
}

const MINUS = "−";

/** A log-probability, or an en dash where none was recorded. */
export function logText(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return `${value <= -0.0005 ? MINUS : ""}${size.toFixed(size >= 99.5 ? 0 : size >= 0.0995 ? 2 : 3)}`;
}

/** A probability or a mass: three significant digits at most, never a rounded-away zero. */
export function massText(value) {
  if (value === 0) return "0";
  if (value < 0.001) return "<.001";
  return value < 1 ? value.toFixed(value < 0.1 ? 3 : 2).replace(/^0/, "") : value.toFixed(2);
}

export function secondsText(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 0.001 ? `${(seconds * 1e3).toFixed(1)} ms` : `${Math.round(seconds * 1e6)} µs`;
}

/** The first characters of a text that is too long for its place. */
export function shorten(text, most) {
  const characters = [...(text ?? "")];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : characters.join("");
}

export function count(n, one, many = `${one}s`) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

/** A term whose definition is a tooltip and is read out with it; all are listed again in the glossary. */
export function term(definitions, key, label) {
  const meaning = definitions?.[key];
  return meaning ? h("dfn", { title: meaning }, label) : label;
}

/** A titled part of the page. */
export function panel(name, title, ...children) {
  return h("section", { class: `ddt-panel ddt-${name}` }, h("h2", {}, title), children);
}

/** A box that scrolls by itself and can be reached and scrolled with the keyboard. */
export function scroller(name, label, ...children) {
  return h("div", { class: `ddt-scroll ddt-${name}`, tabindex: "0", role: "group", "aria-label": label }, children);
}
