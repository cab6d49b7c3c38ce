// What the viewer says in sentences: of a run, a round, a stage, a node. No DOM in here.
import { count, logText, massText, STATES } from "./marks.js";
import { isChosen, ownLogProb } from "./record.js";
import { massOf } from "./tree.js";

export const BONUS = -1; // the bonus token's place among the nodes of a picture

/** A run's settings and what came of it. */
export function runLine({ settings = {}, rounds, num_rounds: all = rounds.length }) {
  const { method, tree_budget: budget, temperature, seed } = settings;
  const emitted = rounds.reduce((sum, round) => sum + (round.emitted?.length ?? 0), 0);
  const parts = [method, budget !== undefined && `budget ${budget}`, temperature !== undefined && `temperature ${temperature}`];
  if (temperature > 0 && seed !== undefined) parts.push(`seed ${seed}`);
  const shown = all === rounds.length ? count(all, "round") : `the first ${rounds.length} of ${count(all, "round")}`;
  return [...parts, shown, emitted > 0 && count(emitted, "emitted token")].filter(Boolean).join(" · ");
}

/** What all of this is, for a reader who has never seen a round. */
export function lead({ rounds }) {
  if (!rounds.some((round) => round.target_ids)) return "A small drafter proposed a tree of possible continuations. The target model has not seen it.";
  return "Each round a small drafter proposes a tree of possible continuations. The target model reads all of it in one pass and keeps the longest path on which every token is the one it would have written itself.";
}

/** Whether a kept node is not what the target chose: somebody forced its path. */
function isForced(round, node) {
  return round.target_ids?.[round.parents[node]] != null && !isChosen(round, node);
}

/** The round in a sentence. */
export function verdict({ walk, budget, round, targets }) {
  const then = targets ? "the target has said what it would write after each" : "nothing verified yet";
  if (!walk) return `${count(budget, "token")} drafted after “${round.texts[0]}”; ${then}.`;
  const kept = walk.kept.length;
  const what = `Of ${count(budget, "drafted token")} the target kept ${kept}`;
  if (!walk.bonus) return `${what}; the text ended there.`;
  const forced = walk.kept.filter((node) => isForced(round, node)).length;
  if (forced) return `Of ${count(budget, "drafted token")} ${kept} were kept, ${forced} of them only because the path was forced; then the target added “${walk.bonus.text}”.`;
  return `${what} and added “${walk.bonus.text}”: ${count(kept + 1, "token")} from one pass.`;
}

/** What verifying a round again has changed: the drafts that it keeps, and the text. */
export function changes(before, after, index) {
  const kept = ({ rounds }) => (rounds[index]?.states ?? []).filter((state) => state === "accepted").length;
  const said = ({ first, rounds }) => [...first.ids, ...rounds.flatMap((round) => round.emitted ?? [])];
  const [was, is, old, now] = [kept(before), kept(after), said(before), said(after)];
  const drafts = was === is ? `This round keeps ${count(is, "draft")}, as before` : `This round keeps ${count(is, "draft")} instead of ${was}`;
  const at = old.findIndex((id, i) => i < now.length && id !== now[i]);
  return `${drafts}; ${at < 0 ? "the text stays the same" : `the text is another one from new token ${at} on`}.`;
}

/** Why a node has its state, as a sentence. */
export function reason(round, node, state, walk, budget) {
  const parent = round.parents[node];
  const quote = (text) => `“${text}”`;
  const asked = parent >= 0 && round.target_texts ? quote(round.target_texts[parent]) : "";
  if (node === 0) return "The anchor: the last token of the text so far, already settled before this round.";
  if (node > budget) return `Outside a budget of ${budget}: by path mass this is drafted token ${node}.`;
  if (state === "pruned") return "Cut from the tree by hand.";
  if (walk.kept?.includes(node) && isForced(round, node)) return `Kept only because the path was forced: after its parent the target chose ${asked}.`;
  if (walk.ended === node) return `Kept: the target chose ${asked} after its parent. The text ends here, so it is not put into the cache.`;
  if (state === "accepted") return `Kept: after its parent the target chose ${asked} too.`;
  if (!round.target_texts || round.target_ids[parent] == null) return "Not verified yet.";
  const onPath = walk.path.includes(parent);
  if (round.target_ids[parent] === round.ids[node])
    return onPath ? "Not kept: the text ended before it." : `Not kept, though the target agrees here: its parent ${quote(round.texts[parent])} was not kept.`;
  if (onPath) return `Not kept: after its parent the target chose ${asked}.`;
  return `Not kept: its parent ${quote(round.texts[parent])} was not kept.`;
}

/** What happens at the stage that is shown. */
export function caption({ round, walk, budget, curves: { mass }, stage, isEdited }) {
  if (isEdited) return "Edited: what the target makes of this tree is not known until it is verified again.";
  const bonus = walk?.bonus ? `, then its own “${walk.bonus.text}”` : ", where the text ended";
  return {
    draft: `The drafter gives one distribution for each of ${count(Math.max(...round.depths), "position")}, in one pass.`,
    tree: `The ${count(budget, "most probable path")} become a tree; the drafter expects ${massText(mass[budget])} of its tokens to be kept.`,
    mask: `Every node sees the ${count(round.past_length, "committed token")}, its ancestors and itself. Nodes of one depth share a position id.`,
    verify: "One pass of the target gives its own choice after every node. A thick edge leads to it where the tree has it.",
    walk: `From the anchor along the target’s choices, as long as the tree has them: ${walk?.kept.length} kept${bonus}.`,
    commit: "The rows of the kept path go into the cache; every other node is undone in every layer.",
  }[stage];
}

/** What a screen reader says of a node. */
export function labelOf({ round, states, walk, targets }, node) {
  if (node === BONUS) return walk?.bonus ? `${walk.bonus.text}, bonus token, target log-probability ${logText(walk.bonus.logProb)}` : "bonus token, not known yet";
  const own = node ? `, draft log-probability ${logText(ownLogProb(round, node))}, path mass ${massText(massOf(round.log_probs[node]))}, rank ${round.ranks[node]}` : "";
  const chosen = targets ? round.target_texts[node] : null;
  const target = chosen === null || chosen === undefined ? "" : `, target chooses ${chosen} ${logText(round.target_log_probs?.[node])}`;
  return `${round.texts[node]}, ${STATES[states[node]][0]}${own}${target}`;
}
