# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6 · Verifiers compared
#
# **At the end you will know** what a verifier has to promise, which of five do, how many drafts each keeps of the same
# recorded rounds, and why an engine that drafts trees but verifies chains writes another text than the target's.
#
# **Time:** 30 minutes to read, about half a minute to run. **Needs:** notebooks 1 and 4. Words in *italics* are in the
# [glossary](glossary.md).
#
# The draft is a guess. The *verifier* decides what becomes text, with two things in hand: `p`, the target's distribution
# at every node, and `q`, the drafter's distribution the guess came from. It is *lossless* if the text it writes has the
# target's own distribution, **whatever the drafter proposed**. How much it keeps is the other question, and the second.

# %%
from textwrap import fill

import numpy as np
from matplotlib import pyplot as plt
from transformers import logging

import ddtree_lab as dl
from ddtree_lab import verifiers as vf
from ddtree_lab.view.chart import BLUE, GREEN, GREY, ORANGE, PINK

logging.set_verbosity_error()  # no word on kernels that a CPU does not have
logging.disable_progress_bar()  # no bar for a file of a few megabytes

# %% [markdown]
# ## A world small enough to try everything
#
# Three tokens, drafts of two. The target is a function from the text to a distribution; the drafter has one *marginal* for
# each depth. Both are made up, so nothing here is special.

# %%
V = 3
memory = {}


def target(text):
    if text not in memory:
        memory[text] = np.random.default_rng([2, *text, 7]).dirichlet(np.ones(V))
    return memory[text]


q = np.random.default_rng(2).dirichlet(np.ones(V), 2)

show = lambda p: "  ".join(f"{x:.2f}" for x in p)
print("first token    p ", show(target(())), "    q ", show(q[0]))
for token in range(V):
    print(f"second, after {token}  p ", show(target((token,))), "    q ", show(q[1]))

# %% [markdown]
# What the drafter thinks of the second token does not depend on the first: that is what makes it a *marginal*, and why a
# guess has to be verified.
#
# ## The five
#
# Each is a few lines of [`verifiers.py`](../ddtree_lab/verifiers.py). Every choice they make goes through a function
# `draw`, so they can be run with dice, or with *all* dice.
#
# **Tree walk.** Draw the target's token at the node. While it is a child, go there and draw again. This is DDTree's.

# %%
tree = dl.build_tree(np.log(q), budget=6)
drafted = vf.DraftedRound.of(tree, target, q)
print(tree.to_text())

outcomes = vf.emissions(vf.tree_walk, drafted)
print(f"\nthe likeliest of its {len(outcomes)} outcomes:")
for tokens, probability in sorted(outcomes.items(), key=lambda x: -x[1])[:4]:
    print(f"  emits {tokens}  with probability {probability:.3f}")

# %% [markdown]
# To judge it, let the target go on behind what was emitted and look at the first four tokens. For a lossless verifier their
# distribution is the target's own. *Total variation* is the largest difference in the probability of any event: 0 is
# lossless.

# %%
LENGTH = 4
own = vf.continued({(): 1.0}, target, LENGTH)
law = vf.continued(vf.emissions(vf.tree_walk, drafted), target, LENGTH)
print("tree walk:", "lossless" if vf.total_variation(law, own) < 1e-12 else "not lossless")

# %% [markdown]
# **Sample and match** is the same on a *chain*, the drafter's favourite at each depth.
#
# **Rejection**, the verifier of the first papers on speculative decoding ([arXiv
# 2211.17192](https://arxiv.org/abs/2211.17192), [arXiv 2302.01318](https://arxiv.org/abs/2302.01318)), wants a chain that
# was *drawn* from `q`. It keeps a token `x` with probability `min(1, p(x) / q(x))`; if it does not, it draws from what
# `p` has over `q`: `max(0, p − q)`, made to sum to 1.
#
# **Rejection of favourites** is the same on a chain that was not drawn: each token is the largest of `q`,
# and `q` is handed over all the same. It is an easy mistake, because greedy drafting is what DFlash does.
#
# **Linear chain** takes a tree and runs rejection down its nodes in the order in which they are stored.

# %%
favourites = vf.DraftedRound.of(dl.build_chain(np.log(q)), target, q)


def reject_drawn(draw):
    """A drawn chain, then its verification: two kinds of dice."""
    return vf.chain_rejection(vf.DraftedRound.of(vf.draw_chain(q, draw), target, q), draw)


laws = {
    "tree walk": vf.emissions(vf.tree_walk, drafted),
    "sample and match, favourites": vf.emissions(vf.sample_and_match, favourites),
    "rejection, drawn chain": vf.enumerated(reject_drawn),
    "rejection, favourites": vf.emissions(vf.chain_rejection, favourites),
    "linear chain over the tree": vf.emissions(vf.linear_chain_rejection, drafted),
}

print(f"{'':<30}{'total variation':>16}{'accepted drafts':>17}")
for name, law in laws.items():
    distance = vf.total_variation(vf.continued(law, target, LENGTH), own)
    verdict = "lossless" if distance < 1e-12 else f"{distance:.3f}"
    print(f"{name:<30}{verdict:>16}{vf.mean_accepted_drafts(law):>17.2f}")

# %% [markdown]
# Three are lossless, two are not, and nothing in the right column gives the two away: rejection of favourites keeps more
# than the honest verifier of the very same chain. **Acceptance says nothing about correctness.** A verifier that keeps
# everything would have the best figure of all. Here is what the two do to the first two tokens of the text:

# %%
pairs = [(a, b) for a in range(V) for b in range(V)]
first_two = lambda law: [vf.continued(law, target, 2).get(pair, 0.0) for pair in pairs]

figure, axis = plt.subplots(figsize=(7.2, 2.8))
bars = (
    ("the target's own", {(): 1.0}, BLUE, ""),
    ("rejection, favourites", laws["rejection, favourites"], ORANGE, "//"),
    ("linear chain over the tree", laws["linear chain over the tree"], PINK, ".."),
)
for i, (name, law, colour, hatch) in enumerate(bars):
    x = np.arange(9) + 0.27 * (i - 1)
    axis.bar(x, first_two(law), 0.25, color=colour, hatch=hatch, edgecolor="white", label=name)
axis.set_xticks(range(9), [f"{a} {b}" for a, b in pairs])
axis.set_xlabel("first two tokens of the text"), axis.set_ylabel("probability")
axis.legend(frameon=False, fontsize=9)
dl.chart(
    figure,
    "the first two tokens: the target's own distribution and what two verifiers make of it",
)

# %% [markdown]
# ## Why the linear chain is wrong
#
# The order in which a best-first tree is stored is the order of its scores, not of any text. Take this tree and a target
# that says 7, then 8, and look at greedy decoding, where there is no dice to hide behind:

# %%
small = dl.DraftTree.from_parents([5, 7, 8, 9], [-1, 0, 0, 1])
says = [7, 8, 9, 1]  # the target's token after each node
print("5 ┬ 7 ─ 9     stored as 5, 7, 8, 9\n  └ 8\n")
for node in range(4):
    text = " ".join(str(small.token_ids[n]) for n in small.path(node))
    print(f"the target after {text:<6} says {says[node]}")

print("\ntree walk    emits", dl.walk_tree(small, says).token_ids)
print("linear chain emits", dl.linear_chain(small, says).token_ids)

# %% [markdown]
# After `5 7` the target says 8, and node 2 happens to hold an 8. But node 2 is a child of the root: its row was computed
# for the text `5 8`. The 8 is still right, what the target says *there*, 9, is an answer to another text. So the linear
# chain's text stops being the target's exactly one token after the first node that is no child of the one before.
#
# ## The same recorded rounds
#
# How much does each keep on a real draft? Decode at temperature 1, hold every round at its verify stage, and look at it
# from all sides: the tree, the chain of favourites, and a few drawn chains, each verified by the target on the very same
# cache.

# %%
pair = dl.load_pair()
# pair = dl.load_pair("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", device_map="auto")

prompts = dl.bundled_prompts("chat")[:4] + dl.bundled_prompts("docs")[:4]
print("\n".join(f"{prompt.domain:>5}: {prompt.text[:70]!r}…" for prompt in prompts[::4]))


# %%
def softmax(logits):
    return logits.double().softmax(-1).cpu().numpy()


def verified(session, tree, q):
    """The tree with the target's distribution at each node, on the session's own cache."""
    logits = dl.verify_tree(pair.target, session.state.cache, tree).logits
    return vf.DraftedRound(tree, softmax(logits), q)


def chain_of(draft):
    return dl.build_chain(draft.logits, draft.anchor_token_id)


def recorded_rounds(prompt, budget=32, num_drawn=4):
    session = dl.Session(pair, prompt, tree_budget=budget, temperature=1.0, max_new_tokens=40)
    dice = vf.sampled(np.random.default_rng(0))
    while session.next_stage:
        draft, tree = session.step(), session.step()
        if draft.depth > 0:
            q = softmax(draft.logits)
            drawn = [vf.draw_chain(q, dice, draft.anchor_token_id) for _ in range(num_drawn)]
            yield {
                "domain": prompt.domain,
                "tree": verified(session, tree, q),
                "favourites": verified(session, chain_of(draft), q),
                "drawn": [verified(session, chain, q) for chain in drawn],
            }
        session.run(rounds=1)


rounds = [each for prompt in prompts for each in recorded_rounds(prompt)]
{domain: sum(each["domain"] == domain for each in rounds) for domain in ("chat", "docs")}

# %% [markdown]
# Every round now holds its distributions, so any verifier can be run on it as often as we like. Forty times each, and the
# mean over rounds, with its standard error:

# %%
candidates = {
    "tree walk": (vf.tree_walk, lambda each: [each["tree"]]),
    "sample and match, favourites": (vf.sample_and_match, lambda each: [each["favourites"]]),
    "rejection, drawn chain": (vf.chain_rejection, lambda each: each["drawn"]),
    "rejection, favourites": (vf.chain_rejection, lambda each: [each["favourites"]]),
    "linear chain over the tree": (vf.linear_chain_rejection, lambda each: [each["tree"]]),
}
lossless = ("tree walk", "sample and match, favourites", "rejection, drawn chain")


def accepted(name, each, times=40):
    verifier, drafts_of = candidates[name]
    dice, drafts = vf.sampled(np.random.default_rng(1)), drafts_of(each)
    runs = [verifier(drafts[i % len(drafts)], dice) for i in range(times)]
    return np.mean([len(tokens) - 1 for tokens in runs])


kept = {name: np.array([accepted(name, each) for each in rounds]) for name in candidates}
domains = np.array([each["domain"] for each in rounds])

print(f"accepted drafts a round{'chat':>20}{'docs':>16}   lossless")
for name, values in kept.items():
    cells = [values[domains == d] for d in ("chat", "docs")]
    said = "".join(f"{c.mean():>9.2f} ± {c.std() / len(c) ** 0.5:.2f}" for c in cells)
    print(f"{name:<30}{said}   {'yes' if name in lossless else 'NO'}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.4, 2.4), sharey=True)
for axis, domain in zip(axes, ("chat", "docs")):
    means = [kept[name][domains == domain].mean() for name in kept]
    for i, (name, mean) in enumerate(zip(kept, means)):
        colour, hatch = (GREEN, "") if name in lossless else ("white", "///")
        axis.barh(i, mean, color=colour, hatch=hatch, edgecolor=ORANGE if hatch else GREEN)
        axis.annotate(f"{mean:.2f}", (mean, i), (4, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(kept)), list(kept)), axis.set_xlim(0, 1.15 * max(means))
    axis.set_xlabel("accepted drafts a round"), axis.set_title(domain, fontsize=10)
axes[0].invert_yaxis()
figure.suptitle("Hatched: not lossless", fontsize=9, y=1.04)
dl.chart(figure, "accepted drafts a round of the five verifiers; two of them are not lossless")

# %% [markdown]
# Look at the lossless ones. On chat the drafter is nearly always right, and the tree leads, by little. On docs at
# temperature 1 the target is undecided, and the order turns over: a chain of seven drawn tokens with rejection keeps *more*
# than a tree of 32 favourites, and costs a quarter of the rows. To see what each forgives, look at the first draft alone.
# There everything has a formula:
#
# | verifier | probability that the first draft is kept |
# |---|---|
# | sample and match | `p(favourite)` |
# | rejection, drawn | `Σ min(p(x), q(x))` over all `x` |
# | tree walk | `Σ p(x)` over the children `x` of the root |

# %%
first = {name: [] for name in ("sample and match", "rejection, drawn", "tree walk")}
for each in rounds:
    p, q_1, root = each["tree"].target[0], each["tree"].draft[0], each["tree"].tree.children(0)
    first["sample and match"].append(p[q_1.argmax()])
    first["rejection, drawn"].append(np.minimum(p, q_1).sum())
    first["tree walk"].append(p[list(root)].sum())

for name, values in first.items():
    values = np.array(values)
    said = "".join(f"{d}: {values[domains == d].mean():.2f}   " for d in ("chat", "docs"))
    print(f"{name:<18}{said}")
ahead = np.array(first["rejection, drawn"]) > np.array(first["tree walk"])
for domain in ("chat", "docs"):
    share = ahead[domains == domain].mean()
    print(f"rejection is ahead of the tree in {share:.0%} of the rounds of {domain}")

# %%
figure, axis = plt.subplots(figsize=(4.2, 3.6))
for domain, colour, marker in (("chat", BLUE, "o"), ("docs", ORANGE, "^")):
    here = domains == domain
    x, y = (np.array(first[name])[here] for name in ("rejection, drawn", "tree walk"))
    axis.scatter(x, y, s=18, color=colour, marker=marker, alpha=0.7, label=domain)
axis.plot([0, 1], [0, 1], color=GREY, linewidth=1)
axis.set_xlabel("kept by rejection, drawn"), axis.set_ylabel("kept by the tree walk")
axis.set_title("A point a round; above the line the tree keeps more", fontsize=10)
axis.legend(frameon=False, fontsize=9), axis.grid(alpha=0.3)
dl.chart(
    figure,
    "the probability that the first draft is kept, tree walk against rejection, round by round",
)

# %% [markdown]
# On docs the tree is a little ahead at the first draft, in the mean; what the drawn chain wins over a round it wins further
# down, where it still has a token at every depth.
#
# Matching asks one token to be right. The tree puts several tokens into the same place and matches any of them: all of `p`
# where the target hesitates between a few. Rejection forgives as much as `p` and `q` overlap over the *whole* vocabulary:
# where the target could say a hundred things, no budget covers them, but a drafter that is undecided in the same way is
# forgiven.
#
# For a tree that is not drawn but chosen, as DDTree's is, nothing does better than the walk: a lossless verifier must emit
# each token with the target's own probability, so it cannot keep a child more often than `p` of all children.
#
# ## Greedy: what a linear chain does to the text
#
# At temperature 0 there is one right continuation, so a wrong token can be counted. In every recorded round: what the tree
# walk emits is the target's own; what does the linear chain emit?

# %%
wrong_rounds, extra = 0, 0
for each in rounds:
    tree = each["tree"].tree
    path = dl.linear_chain(tree, each["tree"].target.argmax(-1)).path
    # From the first node that is no child of the one before, rows answer another text.
    astray = next((node for node in path[1:] if tree.parents[node] != node - 1), None)
    if astray is not None:
        wrong_rounds, extra = wrong_rounds + 1, extra + len(path) - astray
print(f"rounds that emit tokens that answer another text: {wrong_rounds} of {len(rounds)}")
print(f"such tokens: {extra}")


def greedy_mean(walk):
    walks = [walk(each["tree"].tree, each["tree"].target.argmax(-1)) for each in rounds]
    return np.mean([done.num_accepted_drafts for done in walks])


print(f"accepted drafts a round: tree walk {greedy_mean(dl.walk_tree):.2f}, ", end="")
print(f"linear chain {greedy_mean(dl.linear_chain):.2f}")

# %% [markdown]
# So greedy, the linear chain loses twice: it stops at the first sibling that is not the target's token, although the
# right one may stand one node further on, and where it does not stop it may be wrong. An engine that can only verify
# chains should be given a chain.
#
# ## One more thing that matching has
#
# Walk and match *draw the target's own token* at each position. With the noise of a draw tied to the seed and the position,
# the sampled text is the same for every tree, every budget, and for no draft at all. Rejection throws different dice for
# different drafts, so its texts agree in distribution only, and a test cannot compare them.

# %%
texts = {
    name: dl.generate(
        pair, prompts[0], temperature=1.0, seed=3, max_new_tokens=40, **how
    ).token_ids
    for name, how in {
        "plain decoding": dict(method="autoregressive"),
        "chain": dict(method="dflash"),
        "tree of 8": dict(tree_budget=8),
        "tree of 64": dict(tree_budget=64),
    }.items()
}
print(fill(pair.decode(texts["plain decoding"]), 96))
print("all four the same:", len(set(texts.values())) == 1)

# %% [markdown]
# ## Exercises
#
# **1.** A drafter runs at temperature 0.5 to draw its chain, and the verifier is handed its `q` at temperature 1. Is
# rejection still lossless? Try it in the small world.
#
# <details><summary>Answer</summary>
#
# ```python
# sharp = q**2 / (q**2).sum(-1, keepdims=True)
# wrong_q = lambda draw: vf.chain_rejection(vf.DraftedRound.of(vf.draw_chain(sharp, draw), target, q), draw)
# print(vf.total_variation(vf.continued(vf.enumerated(wrong_q), target, LENGTH), own))
# ```
#
# No. The ratio `p/q` repays exactly what the draw took; with another `q` the books do not balance.
#
# </details>
#
# **2.** Rejection of favourites can be made lossless without changing the chain. How?
#
# <details><summary>Answer</summary>
#
# Say what was really drawn: a favourite is a draw from a distribution that has all its mass on that token.
#
# ```python
# point = vf.point_masses(favourites.tree, V)
# honest = vf.emissions(vf.chain_rejection, vf.DraftedRound(favourites.tree, favourites.target, point))
# print(vf.total_variation(honest, laws["sample and match, favourites"]))
# ```
#
# A token is then kept with probability `p(x)`, and otherwise drawn from `p` without `x`: sample and match, in other words.
#
# </details>
#
# **3.** Add up the target's probabilities of all paths in a tree. Which number of this notebook is that?
#
# <details><summary>Answer</summary>
#
# The expected number of accepted drafts of the tree walk, for the walk passes a node with exactly the target's
# probability of its path. The *mass* of notebook 4 is the same sum with the drafter's probabilities: the drafter's own
# expectation.
#
# </details>
#
# **Next:** [7 · Port your own](07_port_your_own.ipynb).
