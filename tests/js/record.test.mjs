import assert from "node:assert/strict";
import { test } from "node:test";
import * as record from "../../ddtree_lab/view/static/record.js";
import * as words from "../../ddtree_lab/view/static/words.js";
import { childLists, massByBudget } from "../../ddtree_lab/view/static/tree.js";
import { generator, randomRound } from "./random.mjs";

const SEEDS = Array.from({ length: 300 }, (_, seed) => seed);
const close = (a, b) => assert.ok(Math.abs(a - b) < 1e-9, `${a} is not ${b}`);

/** The round that a decode with a smaller budget would have recorded: its tree cut off, walked again. */
function bruteForce(round, budget) {
  const inTree = (i) => i <= budget;
  const emitted = [];
  let node = 0;
  const kept = [];
  while (emitted.length < (round.emitted?.length ?? Infinity)) {
    emitted.push(round.target_ids[node]);
    const child = round.ids.findIndex((id, i) => inTree(i) && round.parents[i] === node && id === emitted.at(-1));
    if (child < 0) return { kept, bonus: emitted.at(-1) };
    kept.push((node = child));
  }
  return { kept, bonus: null };
}

test("the replay of every budget is the walk over the tree of that budget", () => {
  for (const seed of SEEDS) {
    const round = randomRound(seed);
    round.ids.forEach((_, budget) => {
      const walk = record.replay(round, budget);
      const truth = bruteForce(round, budget);
      assert.deepEqual(walk.kept, truth.kept, `seed ${seed}, budget ${budget}`);
      assert.equal(walk.bonus?.id ?? null, truth.bonus);
      assert.deepEqual(walk.path, walk.ended === null ? [0, ...walk.kept] : [0, ...walk.kept.slice(0, -1)]);
      assert.equal(record.acceptedByBudget(round)[budget], truth.kept.length);
    });
  }
});

test("the replay of the whole budget is the recorded round", () => {
  for (const seed of SEEDS) {
    const round = randomRound(seed);
    const walk = record.replay(round, round.ids.length - 1);
    assert.deepEqual(walk.path, round.path);
    assert.equal(walk.bonus?.id ?? null, round.bonus?.id ?? null);
    assert.equal(walk.kept.length + (walk.bonus ? 1 : 0), round.emitted.length);
  }
});

test("a path forced by hand stays as recorded", () => {
  const forced = {
    ids: [1, 2, 3], parents: [-1, 0, 1], target_ids: [9, 3, 4], target_texts: ["j", "c", "d"],
    path: [0, 1], emitted: [2, 3], bonus: { id: 3, text: "c" },
  };
  const walk = record.replay(forced, 2);
  assert.deepEqual([walk.path, walk.ended, walk.bonus.id], [[0, 1], null, 3]);
  const texts = ["a", "b", "c"];
  assert.match(words.reason({ ...forced, texts }, 1, "accepted", walk, 2), /only because the path was forced.*“j”/);
  assert.match(words.verdict({ walk, budget: 2, round: { ...forced, texts } }), /1 of them only because/);
});

test("what a second verification changed is said", () => {
  const run = (states, ...emitted) => ({ first: { ids: [7] }, rounds: [{ states, emitted }] });
  const before = run(["root", "accepted", "rejected"], 1, 2);
  assert.equal(words.changes(before, before, 0), "This round keeps 1 draft, as before; the text stays the same.");
  assert.match(words.changes(before, run(["root", "rejected"], 1), 0), /0 drafts instead of 1; the text stays the same/);
  assert.match(words.changes(before, run(["root", "accepted", "accepted"], 1, 3), 0), /2 drafts instead of 1; .*from new token 2 on/);
});

test("mass by budget is the sum of path probabilities", () => {
  for (const seed of SEEDS.slice(0, 50)) {
    const { log_probs: logProbs } = randomRound(seed);
    massByBudget(logProbs).forEach((mass, budget) => {
      let sum = 0;
      for (let i = 1; i <= budget; i++) sum += Math.exp(logProbs[i]);
      close(mass, sum);
    });
  }
});

test("mask row, position and cache slots are those of the node", () => {
  for (const seed of SEEDS) {
    const round = randomRound(seed);
    const { path } = record.replay(round, round.ids.length - 1);
    const taken = new Set();
    round.ids.forEach((_, node) => {
      const place = record.placeOf(round, node, path);
      assert.equal(place.maskRow, node);
      assert.equal(place.position, round.past_length + place.sees.length - 1);
      assert.equal(place.slotBefore, round.past_length + node);
      assert.equal(place.slotAfter !== null, path.includes(node));
      // Once committed, a row's slot is its position: the cache is that of a plain prefill.
      if (place.slotAfter !== null) assert.equal(place.slotAfter, place.position);
      taken.add(place.slotBefore);
      const sees = round.ids.map((_, i) => i).filter((i) => {
        for (let j = node; j >= 0; j = round.parents[j]) if (j === i) return true;
        return false;
      });
      assert.deepEqual([...place.sees].sort((a, b) => a - b), sees);
    });
    assert.equal(taken.size, round.ids.length);
  }
});

test("every node has one state and a reason that agrees with it", () => {
  for (const seed of SEEDS) {
    const round = randomRound(seed);
    const budget = Math.floor(generator(seed)() * round.ids.length);
    const walk = record.replay(round, budget);
    record.statesFor(round, budget, walk).forEach((state, node) => {
      const sentence = words.reason(round, node, state, walk, budget);
      const begins = { root: "The anchor", accepted: "Kept", rejected: "Not kept", pruned: "Outside" }[state];
      assert.ok(sentence.startsWith(begins), `${state}: ${sentence}`);
    });
  }
});

test("stages run forwards and backwards over the same positions", () => {
  const rounds = [randomRound(1), { ...randomRound(2), target_ids: null }, randomRound(3)];
  const there = [];
  for (let at = { round: 0, stage: "draft" }; at; at = record.step(rounds, at, 1)) there.push(at);
  const back = [];
  for (let at = there.at(-1); at; at = record.step(rounds, at, -1)) back.push(at);
  assert.equal(there.length, 6 + 3 + 6);
  assert.deepEqual(back.reverse(), there);
});

test("the text so far names the origin of every token", () => {
  const rounds = SEEDS.slice(0, 3).map((seed) => randomRound(seed));
  const told = record.origins({ prompt: { ids: [1, 2], texts: ["a", "b"] }, rounds }, 2);
  assert.deepEqual(told.slice(0, 3).map((token) => token.origin), ["prompt", "prompt", "prefill"]);
  const emitted = rounds.flatMap((round) => round.emitted);
  assert.deepEqual(told.slice(3).map((token) => token.id), emitted);
  rounds.forEach((round, r) => {
    const mine = told.filter((token) => token.round === r);
    assert.deepEqual(mine.map((token) => token.depth), round.emitted.map((_, i) => i + 1));
    assert.equal(mine.at(-1).origin, round.bonus ? "bonus" : "draft");
    assert.ok(mine.slice(0, -1).every((token) => token.origin === "draft"));
  });
  assert.equal(record.origins({ prompt: null, rounds }, -1).length, 1);
});

test("two runs are aligned to the first token that differs", () => {
  const run = (tokens, size) => ({
    rounds: [{ ids: [tokens[0]], texts: ["r"] }].concat([]).map((round) => ({
      ...round, emitted: tokens.slice(1), emitted_texts: tokens.slice(1).map(String), bonus: size ? { id: 0 } : null,
    })),
  });
  for (const seed of SEEDS) {
    const random = generator(seed);
    const tokens = (n) => Array.from({ length: n }, () => Math.floor(random() * 2));
    const [a, b] = [tokens(1 + seed % 7), tokens(1 + seed % 5)];
    let common = 0;
    while (common < Math.min(a.length, b.length) && a[common] === b[common]) common++;
    const aligned = record.alignRuns(run(a, 1), run(b, 1));
    assert.equal(aligned.common, common);
    assert.equal(aligned.differs, JSON.stringify(a) !== JSON.stringify(b));
  }
});

test("candidates are the drafter's marginals: the same token at the same depth once, by rank", () => {
  const round = {
    ids: [0, 5, 6, 7, 7], texts: ["", "a", "b", "c", "c"], parents: [-1, 0, 0, 1, 2], depths: [0, 1, 1, 2, 2],
    ranks: [-1, 0, 1, 0, 0], log_probs: [0, -0.1, -2, -0.4, -2.3],
  };
  const columns = record.candidates(round);
  assert.deepEqual(columns.map((column) => column.map((c) => c.text)), [["a", "b"], ["c"]]);
  close(columns[1][0].logProb, -0.3);
});

test("an edited tree keeps its numbering until it is sent, and is a tree then", () => {
  for (const seed of SEEDS) {
    const round = randomRound(seed);
    const random = generator(seed);
    const some = () => Math.floor(random() * round.ids.length);
    const edits = [{ add: { parent: some(), text: " x", id: null } }, { add: { parent: round.ids.length, text: "y", id: 3 } }];
    if (round.ids.length > 1) edits.push({ cut: 1 + (some() % (round.ids.length - 1)) });
    const changed = record.edited(round, edits);
    assert.deepEqual(changed.ids.slice(0, round.ids.length), round.ids);
    assert.equal(round.states, undefined, "the record itself is untouched");
    const sent = record.treeOf(changed);
    sent.parents.forEach((parent, i) => assert.ok(i ? parent >= 0 && parent < i : parent === -1));
    const cut = edits[2]?.cut;
    const gone = changed.parents.filter((_, i) => {
      for (let j = i; j >= 0; j = changed.parents[j]) if (j === cut) return true;
      return false;
    }).length;
    assert.equal(sent.ids.length, round.ids.length + 2 - gone);
    for (const [i, place] of sent.places.entries()) if (i) assert.equal(sent.places[sent.parents[i]], changed.parents[place]);
    assert.equal(childLists(sent.parents).flat().length, sent.ids.length - 1);
  }
});
