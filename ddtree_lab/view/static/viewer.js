// The viewer: one recorded run, read forwards and backwards. The page calls `mount`, and so does the live
// widget; both hand over the same payload.
import { editPanel } from "./edit.js";
import { massPanel, slotsPanel, timingPanel } from "./charts.js";
import { badge, count, h, massText, panel, STATES } from "./marks.js";
import { diffPage, leaksPage } from "./pages.js";
import { draftPanel, figures, layersPanel, nodeDetails, rowsKeeper, rowsTable, textPanel } from "./panels.js";
import { TreePicture } from "./picture.js";
import { curves, edited, isChosen, openingRound, origins, placeOf, replay, stagesOf, statesFor, step } from "./record.js";
import { sheetPage } from "./sheets.js";
import { keepTheme } from "./theme.js";
import { layOut, neighbour, pathTo, search, visibleNodes } from "./tree.js";
import { BONUS, caption, changes, labelOf, lead, reason, runLine, verdict } from "./words.js";

const CAP = 160; // nodes drawn before one asks for all
const ROWS_WITH_NUMBERS = 9; // a tree of more rows is drawn without its numbers unless one asks for them
const COLUMN_WITH_NUMBERS = 135; // pixels
const MORE_DEFINITIONS = {
  past_length: "tokens in the cache before the round; the anchor's position",
  path_mass: "exp of the path's log-probability: the drafter's probability that the whole path is kept",
  row: "a node's number is its row in the verify pass and in the mask",
  token: "the token's text; ␣ is a space, ↵ a line end",
  mask: "which columns a row sees: all committed tokens (the block at the left), its ancestors and itself",
  target_top: "the target's most probable tokens after this node, with their log-probabilities at temperature 1",
};

class TraceView {
  constructor(payload, host, { round = openingRound(payload.rounds), parent, heading = "h3" }) {
    this.payload = payload;
    this.host = host;
    this.at = { round, stage: null, node: null, budget: null, edits: [] };
    this.heading = heading;
    this.asked = { size: null, all: false, opened: new Set(), closed: new Set(), query: "" };
    this.picture = new TreePicture((node) => this.go({ node }), (node) => this.toggle(node));
    this.build();
    parent.append(this.element); // the tree fits itself into the room there is
    this.enter(round);
    this.resized = new ResizeObserver(() => this.picture.fit(this.box.clientWidth));
    this.resized.observe(this.box);
  }

  // --- where we are -------------------------------------------------------------------------------

  /** Everything the panels need, derived from where we are. */
  derive() {
    const { payload, at } = this;
    const recorded = payload.rounds[at.round];
    const round = at.edits.length ? edited(recorded, at.edits) : recorded;
    const stages = stagesOf(round);
    const stage = stages.indexOf(at.stage);
    const budget = at.edits.length ? round.ids.length - 1 : at.budget;
    const full = round.target_ids && !at.edits.length ? replay(round, budget) : null;
    const walk = stage >= 4 ? full : null;
    const committed = stage >= 5 && full !== null;
    const undecided = (_, node) => (node === 0 ? "root" : node > budget ? "pruned" : "drafted");
    const pending = (state, node) => (["root", "pruned", "what-if"].includes(state) ? state : undecided(state, node));
    const states = walk ? statesFor(round, budget, walk) : (round.states ?? round.ids).map(pending);
    const node = at.node >= round.ids.length || (at.node === BONUS && !walk?.bonus) ? 0 : at.node;
    const place = node < 0 ? null : placeOf(round, node, committed ? full.path : []);
    const why = node < 0 ? "" : walk || states[node] !== "drafted" ? reason(round, node, states[node], walk ?? { path: [] }, budget) : "Proposed by the drafter; whether it is kept is not known at this stage.";
    const bonusUnder = full?.bonus ? full.path.at(-1) : null;
    const isSmaller = budget < recorded.ids.length - 1;
    return {
      definitions: { ...MORE_DEFINITIONS, ...payload.definitions }, layers: payload.layers, settings: payload.settings, roundIndex: at.round,
      isEdited: at.edits.length > 0, round, stages, stage: at.stage, budget, full, walk, committed, states, node, place, why, bonusUnder, isSmaller,
      targets: stage >= 3 && Boolean(round.target_ids), built: stage >= 1, curves: curves(at.edits.length ? { ...round, target_ids: null } : recorded),
    };
  }

  /** Go to another round. */
  enter(index, stage = null, node = null) {
    const round = this.payload.rounds[index];
    const stages = stagesOf(round);
    const budget = round.ids.length - 1;
    const full = round.target_ids ? replay(round, budget) : null;
    this.asked = { ...this.asked, opened: new Set(), closed: new Set() };
    this.at = { round: index, stage: stages.includes(stage) ? stage : stages.at(-1), node: node ?? full?.kept[0] ?? Math.min(1, budget), budget, edits: [] };
    this.redraw();
    this.box.scrollTo(0, 0);
  }

  go(patch) {
    if (Object.entries(patch).every(([name, value]) => this.at[name] === value)) return;
    const onlyNode = Object.keys(patch).join() === "node";
    Object.assign(this.at, patch);
    if (patch.edits) this.redraw();
    else if (onlyNode) this.reselect();
    else this.restyle();
    if (onlyNode) this.picture.reveal(this.at.node, this.box);
    if (onlyNode) this.host?.select?.(this.at.round, this.at.node);
  }

  /** One stage further or back, over the ends of rounds; the live line says what happens there. */
  move(by) {
    const next = step(this.payload.rounds, this.at, by);
    if (!next) return this.say(by > 0 ? "This is the last stage of the last round." : "This is the first stage of the first round.");
    if (next.round !== this.at.round) this.enter(next.round, next.stage);
    else this.go({ stage: next.stage });
    return this.say(`Round ${next.round + 1}, ${next.stage}. ${caption(this.view)}`);
  }

  moveRound(by) {
    const index = this.at.round + by;
    if (!this.payload.rounds[index]) return this.say(by > 0 ? "This is the last round." : "This is the first round.");
    this.enter(index, this.at.stage);
    return this.say(`Round ${index + 1}. ${verdict(this.view)}`);
  }

  setBudget(budget) {
    this.go({ budget });
    const { walk, curves: { mass } } = this.view;
    this.say(`Budget ${budget}: ${walk ? `${walk.kept.length} kept, ` : ""}mass ${massText(mass[budget])}.`);
  }

  toggle(node) {
    const { opened, closed } = this.asked;
    const isOpen = this.view.round.parents.some((parent, i) => parent === node && this.picture.items.has(i));
    if (isOpen) closed.add(node), opened.delete(node);
    else closed.delete(node), opened.add(node);
    this.at.node = node;
    this.redraw();
    this.picture.reveal(node, this.box, { focus: true });
  }

  find(query) {
    this.asked.query = query;
    const hits = search(this.view.round.texts, query);
    this.hits = hits;
    if (query && hits.length) {
      const node = hits[0];
      const hiddenHit = !this.picture.items.has(node);
      this.at.node = node;
      if (hiddenHit) this.redraw();
      else this.reselect();
      this.picture.reveal(node, this.box);
    } else this.reselect();
    if (query) this.say(`${count(hits.length, "node")} found.`);
  }

  // --- drawing ------------------------------------------------------------------------------------

  build() {
    const { payload } = this;
    const button = (words, label, onclick) => h("button", { type: "button", "aria-label": label, title: label, onclick }, words);
    const many = payload.rounds.length > 1;
    this.parts = {
      verdict: h("p", { class: "ddt-verdict" }), figures: h("div"), round: h("output", { class: "ddt-round-number" }), stages: h("div", { class: "ddt-steps", role: "group", "aria-label": "Stage of the round" }),
      caption: h("p", { class: "ddt-caption" }), live: h("p", { class: "ddt-hidden", "aria-live": "polite" }),
      budget: h("input", { type: "range", min: "0", step: "1", oninput: (event) => this.setBudget(Number(event.target.value)) }),
      budgetText: h("output", {}), exact: h("span", { class: "ddt-note" }),
      query: h("input", { type: "search", placeholder: "text or #node", "aria-label": "Search the tree", size: "12", oninput: (event) => this.find(event.target.value) }),
      size: h("button", { type: "button", onclick: () => this.resize() }), all: h("button", { type: "button", onclick: () => this.showAll() }),
      panels: h("div", { class: "ddt-panels" }), details: h("div", { class: "ddt-details-body" }),
    };
    const p = this.parts;
    this.words = h("div", { class: "ddt-holder" });
    this.box = h("div", { class: "ddt-scroll ddt-tree-box" }, this.picture.svg);
    this.edit = this.host?.request ? editPanel(this.host, { edits: () => this.at.edits, change: (edits) => this.go({ edits }), answer: (answer) => this.answered(answer) }) : null;
    const legend = h("p", { class: "ddt-legend", "aria-label": "What the marks mean" }, Object.entries(STATES).map(([state, [word, , , meaning]]) => h("span", { title: meaning }, badge(state, word))));
    this.element = h("div", { class: "ddt-run" },
      h("div", { class: "ddt-header" }, h(this.heading, { class: "ddt-title" }, payload.title), h("p", { class: "ddt-note" }, runLine(payload)), this.heading === "h1" && h("p", { class: "ddt-note" }, lead(payload)), p.verdict, p.figures),
      h("div", { class: "ddt-controls" },
        many && h("div", { class: "ddt-rounds", role: "group", "aria-label": "Round" }, button("‹", "Previous round ({)", () => this.moveRound(-1)), p.round, button("›", "Next round (})", () => this.moveRound(1))),
        h("div", { class: "ddt-stage-row", role: "group", "aria-label": "Stages" }, button("←", "Stage back ([)", () => this.move(-1)), p.stages, button("→", "Stage forward (])", () => this.move(1))),
        h("label", { class: "ddt-budget" }, h("span", {}, "budget "), p.budget, p.budgetText), p.exact),
      p.caption, p.live,
      h("div", { class: "ddt-stage" },
        h("div", { class: "ddt-side" }, h("section", { class: "ddt-panel ddt-tree-panel" },
          h("div", { class: "ddt-bar-row" }, h("h2", {}, "Draft tree"), p.query, p.size, p.all), this.box, legend,
          h("p", { class: "ddt-note ddt-keys" }, "Keys: arrows parent, child, sibling · [ ] stage · { } round · / search · Enter fold · Esc leave")),
          this.edit?.element, this.words),
        h("div", { class: "ddt-side" }, panel("details", "Selected node", p.details))),
      p.panels,
      h("details", { class: "ddt-panel ddt-glossary" }, h("summary", {}, "What every number means"),
        h("dl", {}, Object.entries({ ...MORE_DEFINITIONS, ...payload.definitions }).map(([key, meaning]) => [h("dt", {}, key.replaceAll("_", " ")), h("dd", {}, meaning)]))));
    this.element.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Another round, another set of nodes or another size: the pictures are made anew. */
  redraw() {
    const view = (this.view = this.derive());
    const { round, full } = view;
    const keep = [...(full?.kept ?? []), Math.max(view.node, 0), ...(round.states?.flatMap((state, i) => (state === "what-if" ? [i] : [])) ?? [])];
    const shown = (this.shown = visibleNodes(round, { cap: this.asked.all ? Infinity : CAP, keep, opened: this.asked.opened, closed: this.asked.closed }));
    const isBonusShown = view.bonusUnder !== null && shown.nodes.includes(view.bonusUnder) && !this.asked.closed.has(view.bonusUnder);
    const under = isBonusShown ? view.bonusUnder : null;
    const size = this.asked.size ?? this.roomFor(round, shown.nodes, under);
    this.picture.build(round, shown, under === null ? null : { under, text: full.bonus.text }, size);
    this.picture.fit(this.box.clientWidth);
    this.drawn = view.bonusUnder;
    this.size = size;
    this.mass = massPanel(view, (budget) => this.setBudget(budget));
    this.slots = slotsPanel(view, (node) => this.pick(node));
    this.rows = rowsTable(view, shown.nodes);
    this.keepRows = rowsKeeper(this.rows);
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest("[data-row]");
      if (row) this.pick(Number(row.dataset.row));
    });
    this.layers = h("div", { class: "ddt-holder" });
    const left = shown.nodes.length < round.ids.length ? ` (${shown.nodes.length} of ${round.ids.length} rows, as in the tree)` : "";
    const note = h("p", { class: "ddt-note" }, `A node’s number is its row in the verify pass${left}.`);
    const columns = [
      [panel("rows-panel", "Mask rows, positions and slots", note, this.rows)],
      [this.slots.element, this.layers, draftPanel(view)],
      [this.mass?.element, timingPanel(view)],
    ];
    this.parts.panels.replaceChildren(...columns.map((column) => h("div", { class: "ddt-column" }, column)));
    this.restyle();
  }

  /** Numbers in the nodes where a low tree leaves room for them. */
  roomFor(round, nodes, under) {
    const { rows, columns } = layOut(round.parents, nodes, under);
    return rows <= ROWS_WITH_NUMBERS && columns * COLUMN_WITH_NUMBERS <= this.box.clientWidth ? "numbers" : "compact";
  }

  /** Another stage or budget: states change, nothing moves unless the bonus token does. */
  restyle() {
    const view = (this.view = this.derive());
    if (this.drawn !== view.bonusUnder) return this.redraw();
    const { parts } = this;
    const { round, budget, walk, isSmaller, stages, stage } = view;
    const last = this.payload.rounds[this.at.round].ids.length - 1;
    this.picture.restyle({
      states: view.states, bonus: walk?.bonus ?? null, bonusState: isSmaller && walk?.bonus?.id !== round.bonus?.id ? "what-if" : "bonus",
      targets: view.targets, built: view.built, isChosen: (node) => view.stage === "verify" && isChosen(round, node), label: (node) => labelOf(view, node),
    });
    parts.verdict.textContent = verdict(view);
    parts.figures.replaceChildren(figures(view));
    parts.round.textContent = `round ${(this.payload.round_numbers?.[this.at.round] ?? this.at.round) + 1} of ${this.payload.num_rounds ?? this.payload.rounds.length}`;
    if (parts.stages.dataset.stages !== stages.join()) {
      parts.stages.replaceChildren(...stages.map((name) => h("button", { type: "button", "data-stage": name, onclick: () => this.go({ stage: name }) }, name)));
      parts.stages.dataset.stages = stages.join();
    }
    for (const item of parts.stages.children) item.setAttribute("aria-current", item.dataset.stage === stage ? "step" : "false");
    this.element.dataset.stage = stage;
    parts.caption.textContent = caption(this.view);
    Object.assign(parts.budget, { max: String(last), value: String(Math.min(budget, last)), disabled: last === 0 || this.at.edits.length > 0 });
    parts.budgetText.textContent = `${budget} of ${last}`;
    parts.exact.textContent = isSmaller ? "Replayed from the record, no model: exact within this round; the rounds after it would begin elsewhere." : "";
    parts.size.textContent = this.size === "numbers" ? "Hide numbers" : "Show numbers";
    parts.all.textContent = this.asked.all ? "Most probable only" : `Show all ${round.ids.length}`;
    parts.all.hidden = !this.asked.all && this.shown.hidden.size === 0;
    this.mass?.place(Math.min(budget, last));
    const through = walk ? this.at.round : this.at.round - 1;
    this.words.replaceChildren(textPanel(origins(this.payload, through), view, (token) => this.enter(token.round)));
    const words = this.words.querySelector(".ddt-scroll");
    requestAnimationFrame(() => (words.scrollTop = words.scrollHeight));
    return this.reselect();
  }

  /** Another node: only what is lit changes. */
  reselect() {
    const view = (this.view = this.derive());
    this.at.node = view.node;
    const path = view.node < 0 ? (view.walk?.path ?? []) : pathTo(view.round.parents, view.node);
    this.picture.select(view.node, path, this.asked.query ? (this.hits ?? []) : []);
    this.parts.details.replaceChildren(...nodeDetails(view).filter(Boolean));
    this.keepRows(view);
    this.slots.restyle(view);
    const offer = `${view.round.depths[view.node]} ${view.round.ids[view.node]}`;
    for (const item of this.parts.panels.querySelectorAll("[data-offer]")) item.classList.toggle("ddt-chosen", item.dataset.offer === offer);
    this.layers.replaceChildren(...[layersPanel(view)].filter(Boolean));
    this.edit?.restyle(view);
  }

  pick(node) {
    if (!this.picture.items.has(node)) {
      this.at.node = node;
      this.redraw();
    } else this.go({ node });
  }

  resize() {
    this.asked.size = this.size === "numbers" ? "compact" : "numbers";
    this.redraw();
  }

  showAll() {
    this.asked = { ...this.asked, all: !this.asked.all, opened: new Set(), closed: new Set() };
    this.redraw();
  }

  /** The model has verified a changed tree; what came of it, in a sentence. */
  answered(payload) {
    const sentence = changes(this.payload, payload, this.at.round);
    this.replace(payload);
    return sentence;
  }

  replace(payload) {
    this.payload = payload;
    const { round, stage, node } = this.at;
    this.enter(Math.min(round, payload.rounds.length - 1), stage, node);
  }

  say(words) {
    this.parts.live.textContent = words;
  }

  // --- keys ---------------------------------------------------------------------------------------

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const isTyping = event.target.matches("input:not([type=range]), select, textarea");
    const inTree = event.target.closest("[role=tree]");
    if (this.act(event.key, isTyping, inTree)) event.preventDefault();
  }

  act(key, isTyping, inTree) {
    if (key === "Escape") return this.leave(isTyping);
    if (isTyping) return key === "Enter" && this.hits?.length ? (this.focusTree(), true) : false;
    const anywhere = { "[": () => this.move(-1), "]": () => this.move(1), "{": () => this.moveRound(-1), "}": () => this.moveRound(1) };
    if (key === "/") return this.parts.query.focus(), true;
    if (anywhere[key]) {
      anywhere[key]();
      if (inTree) this.focusTree();
      return true;
    }
    if (!inTree) return false;
    if (key === "Enter" || key === " ") return this.at.node >= 0 && (this.toggle(this.at.node), true);
    if (!key.startsWith("Arrow") && key !== "Home" && key !== "End") return false;
    const { layout } = this.picture;
    if (key === "ArrowRight" && this.shown.hidden.has(this.at.node)) this.toggle(this.at.node);
    const end = this.view.walk?.bonus && layout.x.has(BONUS) ? BONUS : (this.view.walk?.kept.at(-1) ?? this.shown.nodes.at(-1));
    let node = neighbour(this.view.round.parents, layout, this.at.node, key, end);
    if (node === BONUS && !this.view.walk?.bonus) node = this.at.node;
    this.go({ node });
    this.focusTree();
    return true;
  }

  focusTree() {
    this.picture.reveal(this.at.node, this.box, { focus: true });
  }

  /** Escape: out of the search to the tree, out of the viewer to what holds it. */
  leave(isTyping) {
    if (isTyping) {
      this.parts.query.value = "";
      this.find("");
      this.focusTree();
      return true;
    }
    document.activeElement?.blur();
    this.element.closest("[tabindex]:not(.ddt)")?.focus();
    window.parent !== window && window.parent.postMessage({ ddtree: "leave" }, "*");
    return true;
  }
}

/**
 * Draw a payload into an element.
 *
 * @param {{payload: object, el: HTMLElement, host?: {request?: Function, select?: Function} | null}} options
 * @returns {{replace: (payload: object) => void, destroy: () => void}}
 */
export function mount({ payload, el, host = null }) {
  const root = h("div", { class: "ddt", "data-lm-suppress-shortcuts": "true" });
  el.replaceChildren(root);
  const forget = keepTheme(root);
  let view = null;
  const draw = (given) => {
    try {
      if (given?.version !== 1) throw new Error(`this page reads payloads of version 1, and was given version ${given?.version}.`);
      if (view?.payload.kind === "trace" && given.kind === "trace") return view.replace(given);
      view = null;
      if (given.kind === "diff") root.replaceChildren(diffPage(given, (run, round, parent) => new TraceView(run, null, { round, parent })));
      else if (given.kind === "leaks") root.replaceChildren(leaksPage(given));
      else if (given.kind === "sheet") root.replaceChildren(sheetPage(given));
      else if (!given.rounds?.length) root.replaceChildren(h("div", { class: "ddt-header" }, h("h1", { class: "ddt-title" }, given.title), h("p", {}, "There is no round in this trace yet.")));
      else {
        root.replaceChildren();
        view = new TraceView(given, host, { parent: root, heading: "h1" });
      }
    } catch (fault) {
      root.replaceChildren(h("p", { class: "ddt-alarm", role: "alert" }, `The viewer could not draw this: ${fault.message ?? fault}`));
      console.error(fault);
    }
    return undefined;
  };
  draw(payload);
  return { replace: draw, destroy: forget };
}
