// Random rounds from a seed, for tests that compare with brute force.

/** A generator of numbers in [0, 1): mulberry32. */
export function generator(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** A round as the payload has it: a tree whose path sums never increase, and a target that often agrees. */
export function randomRound(seed, most = 40) {
  const random = generator(seed);
  const upTo = (n) => Math.floor(random() * n);
  const n = 1 + upTo(most);
  const nodes = [{ parent: -1, id: upTo(50), depth: 0, logProb: 0 }];
  while (nodes.length < n) {
    const parent = upTo(nodes.length);
    const taken = new Set(nodes.filter((node) => node.parent === parent).map((node) => node.id));
    const id = upTo(50);
    if (taken.has(id)) continue;
    nodes.push({ parent, id, depth: nodes[parent].depth + 1, logProb: nodes[parent].logProb + Math.log(random()) });
  }
  const childrenOf = (i) => nodes.filter((node) => node.parent === i);
  const target = nodes.map((_, i) => {
    const ids = childrenOf(i).map((node) => node.id);
    return ids.length && random() < 0.8 ? ids[upTo(ids.length)] : upTo(50);
  });
  const round = {
    past_length: upTo(100),
    ids: nodes.map((node) => node.id),
    parents: nodes.map((node) => node.parent),
    depths: nodes.map((node) => node.depth),
    ranks: nodes.map((_, i) => (i ? upTo(5) : -1)),
    log_probs: nodes.map((node) => node.logProb),
    texts: nodes.map((node) => `t${node.id}`),
    target_ids: target,
    target_texts: target.map((id) => `t${id}`),
    target_log_probs: target.map(() => Math.log(random())),
    stage_seconds: {},
  };
  return { ...round, ...walk(round, random) };
}

/** The recorded walk, the text sometimes ending inside the tree. */
function walk(round, random) {
  const path = [0];
  const emitted = [];
  let bonus = null;
  const limit = random() < 0.3 ? 1 + Math.floor(random() * 3) : Infinity;
  for (;;) {
    const token = round.target_ids[path.at(-1)];
    emitted.push(token);
    const child = round.ids.findIndex((id, i) => round.parents[i] === path.at(-1) && id === token);
    if (child < 0) bonus = { id: token, text: `t${token}` };
    if (child < 0 || emitted.length === limit) break;
    path.push(child);
  }
  return { path, emitted, emitted_texts: emitted.map((id) => `t${id}`), bonus };
}
