// What a recorded round says when asked: walks of smaller budgets, places in mask and cache, reasons.
// Everything is derived from the payload; no model is needed and none is imitated.
import { massByBudget, pathTo } from "./tree.js";

export const STAGES = ["draft", "tree", "mask", "verify", "walk", "commit"];

/** The stages that this round has data for. */
export function stagesOf(round) {
  return round.target_ids ? STAGES : STAGES.slice(0, 3);
}

/** The round to open on: many drafts kept, and not all of them the drafter's favourites. */
export function openingRound(rounds) {
  const interest = ({ states = [], ranks }) => {
    const kept = states.flatMap((state, node) => (state === "accepted" ? [node] : []));
    const surprises = kept.filter((node) => ranks[node] > 0).length;
    return 1000 * (2 * Math.min(surprises, 1) + kept.length) + surprises;
  };
  return rounds.reduce((best, round, i) => (interest(round) > interest(rounds[best]) ? i : best), 0);
}

/** One step through the stages, over the ends of rounds; null where there is nothing further. */
export function step(rounds, at, by) {
  const stages = stagesOf(rounds[at.round]);
  const stage = stages.indexOf(at.stage) + by;
  if (stages[stage]) return { round: at.round, stage: stages[stage] };
  const round = at.round + by;
  if (!rounds[round]) return null;
  const others = stagesOf(rounds[round]);
  return { round, stage: by > 0 ? others[0] : others.at(-1) };
}

/**
 * The walk over the first `budget` drafted nodes. A best-first tree of a smaller budget is a prefix of
 * a larger one, and the target's choice at a node does not depend on the nodes beside it.
 *
 * @returns {{path: number[], ended: number | null, bonus: {id, text, logProb} | null, kept: number[]}}
 *   path: committed nodes, root first; ended: a drafted node that ended the text and stays out of the
 *   cache; kept: accepted drafts in order.
 */
export function replay(round, budget) {
  const recorded = budget >= round.ids.length - 1 && round.path;
  const path = recorded ? [...round.path] : [0];
  const limit = round.emitted?.length ?? Infinity; // the text may have ended inside the tree
  const chosenChild = (node) => {
    const token = round.target_ids[node];
    const last = Math.min(budget, round.ids.length - 1);
    for (let i = node + 1; i <= last; i++) if (round.parents[i] === node && round.ids[i] === token) return i;
    return null;
  };
  let next = chosenChild(path.at(-1));
  while (!recorded && next !== null && path.length < limit) {
    path.push(next);
    next = chosenChild(next);
  }
  const ended = recorded && round.bonus ? null : next;
  const bonus = ended === null ? bonusAt(round, path.at(-1), recorded) : null;
  return { path, ended, bonus, kept: ended === null ? path.slice(1) : [...path.slice(1), ended] };
}

function bonusAt(round, node, recorded) {
  const said = recorded && round.bonus ? round.bonus : { id: round.target_ids[node], text: round.target_texts[node] };
  return { ...said, logProb: round.target_log_probs?.[node] ?? null };
}

/** The state of every node under a budget. */
export function statesFor(round, budget, walk) {
  const kept = new Set(walk.kept);
  return round.ids.map((_, node) => {
    if (node === 0) return "root";
    if (node > budget || round.states?.[node] === "pruned") return "pruned";
    if (round.states?.[node] === "what-if") return "what-if";
    return kept.has(node) ? "accepted" : "rejected";
  });
}

/** Whether a node's token is the one that the target chose after its parent, kept or not. */
export function isChosen({ ids, parents, target_ids: chosen }, node) {
  return chosen?.[parents[node]] != null && chosen[parents[node]] === ids[node];
}

/** Accepted drafts under every budget, 0 to all nodes: what was really gained beside what was expected. */
export function acceptedByBudget(round) {
  const kept = replay(round, round.ids.length - 1).kept;
  return round.ids.map((_, budget) => kept.filter((node) => node <= budget).length);
}

/** Expected and real accepted drafts by budget. */
export function curves(round) {
  return { mass: massByBudget(round.log_probs), accepted: round.target_ids ? acceptedByBudget(round) : null };
}

/** Where a node is in mask, positions and cache. */
export function placeOf(round, node, path) {
  const index = path.indexOf(node);
  return {
    maskRow: node,
    sees: pathTo(round.parents, node),
    position: round.past_length + round.depths[node],
    slotBefore: round.past_length + node,
    slotAfter: index < 0 ? null : round.past_length + index,
  };
}

/** The drafter's own log-probability of a node's token: its path's less its parent's; null if unknown. */
export function ownLogProb(round, node) {
  const [path, above] = [round.log_probs[node], round.log_probs[round.parents[node]]];
  return path === null || above === null || node === 0 || round.ranks[node] < 0 ? null : path - above;
}

/** What the drafter offered at each depth, as far as the tree took it in: its marginals. */
export function candidates(round) {
  const columns = [];
  round.ids.forEach((id, node) => {
    if (node === 0 || round.ranks[node] < 0) return;
    const column = (columns[round.depths[node] - 1] ??= new Map());
    if (!column.has(id))
      column.set(id, { id, text: round.texts[node], rank: round.ranks[node], logProb: ownLogProb(round, node) });
  });
  return Array.from(columns, (column) => [...(column?.values() ?? [])].sort((a, b) => a.rank - b.rank));
}

/**
 * The text up to a round, each token with where it came from.
 *
 * @returns {{id, text, origin: "prompt" | "prefill" | "draft" | "bonus", depth: number, round: number}[]}
 */
export function origins(payload, lastRound) {
  const { prompt, rounds, first } = payload;
  const told = [];
  const add = (origin, ids, texts) => ids.forEach((id, i) => told.push({ id, text: texts[i], origin, depth: 0, round: -1 }));
  add("prompt", prompt?.ids ?? [], prompt?.texts ?? []);
  if (first) add("prefill", first.ids, first.texts);
  else if (rounds[0]) add("prefill", rounds[0].ids.slice(0, 1), rounds[0].texts);
  if (payload.round_numbers?.[0] > 0) told.push({ id: null, text: "…", origin: "prompt", depth: 0, round: -1 });
  rounds.slice(0, lastRound + 1).forEach((round, r) => {
    (round.emitted ?? []).forEach((id, i) => {
      const isBonus = round.bonus && i === round.emitted.length - 1;
      told.push({ id, text: round.emitted_texts[i], origin: isBonus ? "bonus" : "draft", depth: i + 1, round: r });
    });
  });
  return told;
}

/** Two runs token by token up to `after` tokens behind their first difference. */
export function alignRuns(a, b, after = 12) {
  const [left, right] = [a, b].map((run) => origins({ ...run, prompt: null }, run.rounds.length - 1));
  const shorter = Math.min(left.length, right.length);
  let common = 0;
  while (common < shorter && left[common].id === right[common].id) common++;
  const differs = common < left.length || common < right.length;
  return { common, differs, left: left.slice(0, common + after), right: right.slice(0, common + after) };
}

/**
 * A round with edits that are not verified yet: children added, branches cut. Added nodes come last, so
 * they never renumber the others, and have the state "what-if".
 */
export function edited(round, edits) {
  const copy = { ...round, edited: edits.length > 0 };
  for (const name of ["ids", "texts", "parents", "depths", "ranks", "log_probs"]) copy[name] = [...round[name]];
  copy.states = [...(round.states ?? round.ids.map((_, i) => (i ? "rejected" : "root")))];
  for (const name of ["target_ids", "target_texts", "target_log_probs", "token_target_log_probs", "target_top"])
    copy[name] = round[name] && [...round[name]];
  for (const { add, cut } of edits) {
    if (add) {
      const known = { ids: add.id ?? null, texts: add.text, parents: add.parent, depths: copy.depths[add.parent] + 1 };
      const unknown = { ranks: -1, log_probs: null, states: "what-if" };
      for (const [name, value] of Object.entries({ ...known, ...unknown })) copy[name].push(value);
      for (const name of ["target_ids", "target_texts", "target_log_probs", "token_target_log_probs", "target_top"])
        copy[name]?.push(null);
    } else {
      copy.parents.forEach((_, node) => pathTo(copy.parents, node).includes(cut) && (copy.states[node] = "pruned"));
    }
  }
  return copy;
}

/** The tree of an edited round as a request: cut nodes left out, the rest renumbered. */
export function treeOf(round) {
  const left = round.ids.map((_, node) => node).filter((node) => round.states[node] !== "pruned");
  const place = new Map(left.map((node, i) => [node, i]));
  const pick = (name) => left.map((node) => round[name][node]);
  const parents = left.map((node) => (node ? place.get(round.parents[node]) : -1));
  return { ids: pick("ids"), texts: pick("texts"), parents, ranks: pick("ranks"), log_probs: pick("log_probs"), places: left };
}
