// Small pictures of a round: mass against budget, the cache before and after, where the time went.
import { h, massText, panel, s, scroller, secondsText } from "./marks.js";

const W = 340;
const H = 168;
const LEFT = 30;
const BOTTOM = 30;

/** Expected and real accepted drafts by budget, and the slider's place. */
export function massPanel(view, onBudget) {
  const { mass, accepted } = view.curves;
  const most = mass.length - 1;
  if (most < 1) return null;
  const top = Math.max(1, Math.ceil(Math.max(mass[most], accepted ? accepted[most] : 0)));
  const x = (b) => LEFT + (b / most) * (W - LEFT - 10);
  const y = (v) => H - BOTTOM - (v / top) * (H - BOTTOM - 10);
  const ticks = [...new Set([0, top / 2, top].filter(Number.isInteger))];
  const steps = accepted && accepted.map((v, b) => (b ? `H${x(b).toFixed(1)}V${y(v).toFixed(1)}` : `M${x(0)} ${y(v)}`)).join("");
  const chart = s("svg", { viewBox: `0 0 ${W} ${H}`, class: "ddt-chart", role: "img", "aria-label": "Accepted drafts by budget, expected by the drafter and real" },
    ticks.map((v) => [s("path", { class: "ddt-grid", d: `M${LEFT} ${y(v)}H${W - 10}` }), s("text", { x: LEFT - 6, y: y(v) + 3.5, "text-anchor": "end" }, String(v))]),
    [0, most].map((b) => s("text", { x: x(b), y: H - BOTTOM + 14, "text-anchor": b ? "end" : "start" }, String(b))),
    s("text", { x: (LEFT + W) / 2, y: H - 4, "text-anchor": "middle" }, "budget"),
    s("path", { class: "ddt-line-mass", d: mass.map((v, b) => `${b ? "L" : "M"}${x(b).toFixed(1)} ${y(v).toFixed(1)}`).join("") }),
    steps && s("path", { class: "ddt-line-real", d: steps }),
    s("path", { class: "ddt-cursor" }), s("circle", { class: "ddt-dot-mass", r: 4 }), accepted && s("rect", { class: "ddt-dot-real", width: 8, height: 8 }));
  chart.addEventListener("click", (event) => {
    const at = chart.getBoundingClientRect();
    const b = (((event.clientX - at.left) / at.width) * W - LEFT) / (W - LEFT - 10);
    onBudget(Math.round(Math.min(1, Math.max(0, b)) * most));
  });
  const words = h("p", { class: "ddt-key" });
  const place = (budget) => {
    chart.querySelector(".ddt-cursor").setAttribute("d", `M${x(budget)} ${y(top)}V${y(0)}`);
    const dot = chart.querySelector(".ddt-dot-mass");
    dot.setAttribute("cx", x(budget));
    dot.setAttribute("cy", y(mass[budget]));
    if (accepted) chart.querySelector(".ddt-dot-real").setAttribute("transform", `translate(${x(budget) - 4} ${y(accepted[budget]) - 4})`);
    words.replaceChildren(
      h("span", { class: "ddt-key-mass" }, `● expected ${massText(mass[budget])}`),
      accepted ? h("span", { class: "ddt-key-real" }, `■ really kept ${accepted[budget]}`) : "",
      h("span", {}, `at a budget of ${budget}`),
    );
  };
  return { element: panel("mass-by-budget", "Mass captured and drafts kept", chart, words), place };
}

/** The cache's slots before the commit and after it; kept rows are joined by lines. */
export function slotsPanel(view, onSelect) {
  const n = view.round.ids.length;
  const past = view.round.past_length;
  const cell = n <= 40 ? 8 : n <= 100 ? 4 : 2;
  const first = 70;
  const width = first + n * cell + 10;
  const rect = (node, y) => s("rect", { class: "ddt-slot", "data-slot": node, x: first + node * cell, y, width: cell - 1, height: 18 });
  const svg = s("svg", { width, height: 104, viewBox: `0 0 ${width} 104`, class: "ddt-slots-picture", role: "img", "aria-label": "Cache slots before and after the commit" },
    [16, 70].map((y) => [s("rect", { class: "ddt-past", x: 0, y, width: first - 3, height: 18 }), s("text", { x: 6, y: y + 13 }, past ? `0 … ${past - 1}` : "empty")]),
    s("text", { x: 0, y: 10, class: "ddt-soft" }, "before the commit"), s("text", { x: 0, y: 101, class: "ddt-soft" }, "after it"),
    view.round.ids.map((_, node) => rect(node, 16)), s("g", { class: "ddt-moved" }));
  svg.addEventListener("click", (event) => {
    const slot = event.target.closest("[data-slot]");
    if (slot) onSelect(Number(slot.dataset.slot));
  });
  const words = h("p", { class: "ddt-note" });
  const restyle = ({ states, walk, committed, node, round }) => {
    const path = committed ? walk.path : [];
    const centre = (i) => first + i * cell + (cell - 1) / 2;
    svg.querySelector(".ddt-moved").replaceChildren(
      ...path.map((i, k) => s("path", { class: "ddt-move", d: `M${centre(i)} 34C${centre(i)} 54 ${centre(k)} 50 ${centre(k)} 70` })),
      ...path.map((i, k) => {
        const slot = rect(i, 70);
        slot.setAttribute("x", first + k * cell);
        return slot;
      }),
    );
    for (const slot of svg.querySelectorAll("[data-slot]")) {
      const state = states[slot.dataset.slot];
      if (slot.dataset.state !== state) slot.dataset.state = state;
      slot.classList.toggle("ddt-chosen", Number(slot.dataset.slot) === node);
    }
    words.textContent = committed
      ? `${n} pending rows, ${path.length} kept: the cache now holds ${round.past_length + path.length} tokens, as a fresh prefill of them would.`
      : `${n} pending rows after ${past} committed ones; nothing is committed before the walk is known.`;
  };
  return { element: panel("slots", "Cache slots", scroller("slots-box", "Cache slots", svg), words), restyle };
}

/** Seconds of each stage. */
export function timingPanel(view) {
  const times = Object.entries(view.round.stage_seconds ?? {});
  if (!times.length) return null;
  const total = times.reduce((sum, [, seconds]) => sum + seconds, 0);
  return panel("timings", "Time of each stage",
    h("dl", { class: "ddt-times" }, times.map(([stage, seconds]) => [h("dt", {}, stage),
      h("dd", {}, h("span", { class: "ddt-bar", style: `--p:${total ? seconds / total : 0}` }), h("span", { class: "ddt-num" }, secondsText(seconds)))])),
    h("p", { class: "ddt-note" }, `${secondsText(total)} in all, on the machine that recorded it.`));
}
