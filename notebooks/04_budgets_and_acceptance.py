# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · Budgets and acceptance
#
# **At the end you will know** what a larger tree buys, what it costs, how to find the budget that pays on your machine and
# your text, and when to draft no tree at all.
#
# **Time:** 25 minutes to read, about a minute to run. **Needs:** notebook 1. Words in *italics* are in the
# [glossary](glossary.md).
#
# A larger *budget* can only accept more. It also makes the target verify more rows. Speed is the quotient of the two, and
# they grow at different rates.

# %%
import os
from dataclasses import replace
from textwrap import fill

import numpy as np
import torch
from matplotlib import pyplot as plt
from transformers import logging

import ddtree_lab as dl
from ddtree_lab.bench.advisor import advise
from ddtree_lab.costs import costs_of
from ddtree_lab.view.chart import BLUE, GREEN, GREY, ORANGE, PINK

logging.set_verbosity_error()  # no word on kernels that a CPU does not have
logging.disable_progress_bar()  # no bar for a file of a few megabytes

pair = dl.load_pair()
# pair = dl.load_pair("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", device_map="auto")

# %% [markdown]
# ## Record once, at a large budget
#
# The nodes of a tree are stored best first, so a tree of budget 16 is the first 17 nodes of a tree of budget 128 (the root
# is not counted). What it *would* have accepted can be read off the large one: the accepted path as far as it lies within
# the first nodes. One recording answers for all smaller budgets.
#
# Two kinds of text: short chat tasks, which the drafter foresees well, and raw documentation and code, which it finds
# hard.

# %%
chat_prompts = dl.bundled_prompts("chat")[:6]
hard_prompts = [*dl.bundled_prompts("docs")[:2], *dl.bundled_prompts("code")[:2]]


def decode(prompts, method="ddtree", **options):
    return [dl.generate(pair, prompt, method, record=True, **options) for prompt in prompts]


def rounds_of(runs):
    return [round_ for run in runs for round_ in run.trace.rounds]


easy, hard = dict(temperature=0.0, max_new_tokens=60), dict(temperature=0.7, max_new_tokens=40)
recorded = {
    "chat": rounds_of(decode(chat_prompts, tree_budget=128, **easy)),
    "docs and code": rounds_of(decode(hard_prompts, tree_budget=128, **hard)),
}
for name, rounds in recorded.items():
    print(f"{name}: {len(rounds)} rounds")


# %%
def accepted_within(round_, budget):
    """Drafts that a tree of a smaller budget would have accepted in this round."""
    return sum(node <= budget for node in round_.accepted)


def mean_accepted(rounds, budget):
    return np.mean([accepted_within(r, budget) for r in rounds])


# %% [markdown]
# Is reading it off the same as running it? Within a round exactly; afterwards a smaller tree would have begun its next
# round elsewhere, so over a text the two agree in the mean only:

# %%
for budget in (4, 16, 64):
    ran = rounds_of(decode(chat_prompts, tree_budget=budget, **easy))
    really = np.mean([r.num_accepted_drafts for r in ran])
    foreseen = mean_accepted(recorded["chat"], budget)
    print(f"budget {budget:2}: {foreseen:.2f} drafts a round foreseen, {really:.2f} when run")

# %% [markdown]
# ## What a larger tree buys
#
# The drafter has an opinion on its own success. Summed over the nodes of a tree, its path probabilities are the number of
# drafts it expects to be accepted: the tree's *mass*. Best first means exactly that: each node adds the most mass it can.
#
# Mass is the drafter's expectation, acceptance is what the target does. Both against the budget, and the *chain* of the
# drafter's favourites beside them:

# %%
chain_runs = {
    "chat": rounds_of(decode(chat_prompts, "dflash", **easy)),
    "docs and code": rounds_of(decode(hard_prompts, "dflash", **hard)),
}
chain = {name: np.mean([r.num_accepted_drafts for r in rs]) for name, rs in chain_runs.items()}
CHAIN = pair.drafter.num_draft_positions  # nodes of a chain: all positions of the block
budgets = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]

figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.2), sharey=True, layout="constrained")
for axes, (name, rounds) in zip(panels, recorded.items()):
    mass = [np.mean([r.tree.prefix(b).mass for r in rounds]) for b in budgets]
    accepted = [mean_accepted(rounds, b) for b in budgets]
    axes.plot(budgets, mass, "--", color=ORANGE, label="mass: expected")
    axes.plot(budgets, accepted, "o-", ms=3, color=BLUE, label="tree: accepted")
    axes.plot(CHAIN, chain[name], "s", color=PINK, label="chain: accepted")
    axes.set(xscale="log", xlabel="budget: drafted nodes", title=name)
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    axes.grid(alpha=0.3)
panels[0].set_ylabel("drafts a round")
panels[0].legend(frameon=False)
dl.chart(
    figure,
    "Expected and accepted drafts a round against the budget. On chat both rise fast and level off "
    "near the depth of the block; on docs and code they stay low and keep rising.",
)

# %% [markdown]
# On chat the curve soon runs into its ceiling: no round can accept more than the block is deep. On the hard text the chain
# stops almost at once, and it is there that the tree gains most *in proportion*. Compare at the same price, as many nodes
# as the chain has:

# %%
print(f"emitted tokens a round      chain  tree of {CHAIN:2}  tree of 64")
for name, rounds in recorded.items():
    small, large = (1 + mean_accepted(rounds, b) for b in (CHAIN, 64))
    alone = 1 + chain[name]
    print(f"{name:25} {alone:7.2f} {small:11.2f} {large:11.2f}  = {large / alone:.2f} × chain")

# %% [markdown]
# ## One round, and a slider
#
# A round in which the drafter's favourites went astray and the tree held the right token too. Drag the budget: the picture,
# the accepted path and the curve of mass follow, without a model.

# %%
(japan,) = [prompt for prompt in dl.bundled_prompts("chat") if prompt.id == "facts-1"]
trace = decode([japan], tree_budget=24)[0].trace


def favourites(round_):
    return sum(round_.tree.ranks[node] == 0 for node in round_.accepted)


shown = max(trace.rounds, key=lambda r: r.num_accepted_drafts - favourites(r))
dl.view(replace(trace, rounds=(shown,)))

# %% [markdown]
# ## What it costs
#
# A pass over one row and a pass over ten read the same weights. As long as reading is what takes the time, extra rows are
# free. When computing takes over, every row costs. Where that happens is a property of the machine: call it the number of
# *free rows*. An ideal machine then takes
#
# ```
# seconds(n)  ∝  max(1, n / free rows)
# ```
#
# A small CPU has a few free rows, a large GPU serving one user has hundreds. Speed against budget on three such machines,
# relative to plain decoding (the draft is taken to cost a tenth of a plain pass):


# %%
DRAFT_COST = 0.1


def speedup(emitted, num_rows, seconds_of):
    """Tokens a second, relative to plain decoding, where a pass over one row takes 1."""
    return emitted / (DRAFT_COST + seconds_of(num_rows))


def machine(free_rows):
    return lambda num_rows: max(1.0, num_rows / free_rows)


machines = {4: machine(4), 32: machine(32), 256: machine(256)}
looks = {4: (ORANGE, "s"), 32: (BLUE, "o"), 256: (GREEN, "^")}

figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
for axes, (name, rounds) in zip(panels, recorded.items()):
    for free_rows, seconds_of in machines.items():
        color, marker = looks[free_rows]
        ups = [speedup(1 + mean_accepted(rounds, b), b + 1, seconds_of) for b in budgets]
        label = f"{free_rows} free rows"
        axes.plot(budgets, ups, color=color, marker=marker, ms=4, label=label)
        of_chain = speedup(1 + chain[name], CHAIN + 1, seconds_of)
        axes.plot(CHAIN, of_chain, "*", color=color, ms=11, mec="black", mew=0.6)
    axes.axhline(1, color=GREY, lw=0.8)
    axes.set(xscale="log", xlabel="budget: drafted nodes", title=name, ylim=(0, None))
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
panels[0].set_ylabel("speed-up over plain decoding")
panels[0].legend(frameon=False, fontsize=8)
dl.chart(
    figure,
    "Speed-up against budget on three ideal machines; stars: the chain. With few free rows the curve peaks at "
    "a small budget and falls below plain decoding, with many it keeps rising.",
)

# %% [markdown]
# Each curve is acceptance divided by cost: it rises while acceptance grows faster than cost, and falls afterwards. The
# stars are the chain. The published best budgets, hundreds of nodes, come from the right kind of machine; a tree of
# that size on a small one is slower than no tree.
#
# ## When not to use a tree
#
# The best way for each text on each machine:


# %%
def best_way(name, seconds_of):
    ways = {"plain decoding": 1.0, "the chain": speedup(1 + chain[name], CHAIN + 1, seconds_of)}
    for budget in budgets:
        emitted = 1 + mean_accepted(recorded[name], budget)
        ways[f"a tree of {budget}"] = speedup(emitted, budget + 1, seconds_of)
    way = max(ways, key=ways.get)
    return f"{way}, {ways[way]:.2f} × plain decoding"


for name in recorded:
    for free_rows in (1, *machines):
        print(f"{name:14} {free_rows:3} free rows: {best_way(name, machine(free_rows))}")

# %% [markdown]
# With a single free row, where every row costs a full pass, nothing beats plain decoding: a draft would have to be free and
# always right.
#
# ## This machine
#
# Ideal machines have an edge; real ones have a slope, and a round has more in it than the pass. So it is measured: a token
# of plain decoding, a draft, and rounds of growing size. From here to the end of the section the outputs are timings. Yours
# will differ, and on a busy machine they mean nothing.

# %% tags=["varies"]
costs = costs_of(pair)
one = costs.plain_seconds
print(f"{os.cpu_count()} cores, torch on {torch.get_num_threads()} of them")
print(f"plain decoding: {1e3 * one:.1f} ms a token")
print(f"a draft:        {1e3 * costs.draft_seconds:.1f} ms")
for rows, seconds in zip(costs.rows, costs.seconds):
    print(f"a round of {rows:3} rows: {1e3 * seconds:5.1f} ms, or {seconds / one:.1f} tokens")

# %% [markdown]
# The same division as above, with these seconds in place of an ideal machine, is the package's *advice* (on the command
# line: `ddtree-lab bench advise`). It is foreseen from rounds that were recorded and costs that were measured; nothing is
# decoded again.

# %% tags=["varies"]
foreseen = {name: advise(rounds, costs) for name, rounds in recorded.items()}
for name, advice in foreseen.items():
    print(fill(f"{name}: {advice}", 96))

# %% [markdown]
# ## A budget for every round
#
# One budget for a whole text is a compromise: in some rounds the drafter is sure, in others it is not, and it says so
# before anything is verified, by the mass. `tree_budget="auto"` builds a large tree and verifies the prefix of `n` nodes
# that has most expected tokens a second,
#
# ```
# (1 + trust · mass(n)) / (seconds of the draft + seconds of a round of n + 1 rows)
# ```
#
# where *trust* is the share of the mass that was lately accepted. Where drafting has not paid lately, it decodes plainly
# for some rounds. The text is the same whatever it decides.
#
# What was foreseen, and what each way really takes when all are run in turn, prompt by prompt:


# %%
tried = (4, 16, 64, 128)
ways = {"plain": dict(method="autoregressive"), "chain": dict(method="dflash")}
ways |= {budget: dict(tree_budget=budget) for budget in (*tried, "auto")}


def run_in_turn(prompts, options):
    """For each prompt, way → what it decoded."""
    runs = lambda p: {way: dl.generate(pair, p, **how, **options) for way, how in ways.items()}
    return [runs(prompt) for prompt in prompts]


def seconds_a_token(run):
    """After the prefill, which costs every way the same and says nothing about rounds."""
    return (run.seconds - run.prefill_seconds) / (run.num_emitted_tokens - 1)


def median_speedup(ran, way):
    return np.median([seconds_a_token(r["plain"]) / seconds_a_token(r[way]) for r in ran])


# %% tags=["varies"]
measured = {
    "chat": run_in_turn(chat_prompts, easy),
    "docs and code": run_in_turn(hard_prompts, hard),
}
figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
for axes, (name, ran) in zip(panels, measured.items()):
    trees = [choice for choice in foreseen[name].choices if choice.tree_budget]
    ups = [choice.speedup for choice in trees]
    axes.plot([c.tree_budget for c in trees], ups, color=BLUE, label="tree, foreseen")
    taken = [median_speedup(ran, budget) for budget in tried]
    axes.plot(tried, taken, "o", color=BLUE, label="tree, measured")
    axes.plot(CHAIN, median_speedup(ran, "chain"), "s", color=PINK, label="chain, measured")
    auto = median_speedup(ran, "auto")
    axes.axhline(auto, color=GREEN, ls="--", label="auto, measured")
    axes.axhline(1, color=GREY, lw=0.8)
    axes.set(xscale="log", xlabel="budget: drafted nodes", title=name, ylim=(0, None))
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])

    sizes = np.array([done.num_drafted for r in ran for done in r["auto"].rounds])
    same = all(run.token_ids == r["plain"].token_ids for r in ran for run in r.values())
    print(
        f"{name}: auto {auto:.2f} × plain decoding, a median of {np.median(sizes):.0f} nodes,"
    )
    print(f"  no draft in {np.mean(sizes == 0):.0%} of the steps; all texts the same: {same}")
panels[0].set_ylabel("speed-up over plain decoding")
figure.legend(
    *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
)
dl.chart(
    figure,
    "Speed-up against budget on this machine, foreseen and measured, with the chain and the budget "
    "that changes from round to round.",
)

# %% [markdown]
# On a quiet machine the points follow the line, and `"auto"` comes close to the best fixed budget without being told it. On
# the hard text the drafter is wrong so often that a draft pays little: a small tree is somewhat ahead of plain decoding,
# the chain and a large tree are behind it. Where nothing pays, `"auto"` can notice that only by drafting.
#
# Three rules that outlast the numbers:
#
# * where rows are cheap, the tree should be large; where they are dear, small, or a chain;
# * where the drafter is nearly always right, a chain is nearly as good as a tree;
# * where it is nearly always wrong and rows are dear, plain decoding wins.
#
# ## Temperature, on identical noise
#
# With a temperature the target *draws* its token. Here the noise of a draw depends on the seed and the position only, so
# two runs of one seed differ in nothing but the tree, and their texts are the same:

# %%
prompt = chat_prompts[0]
drawn = [dl.generate(pair, prompt, tree_budget=b, temperature=1.0, seed=7) for b in (0, 8, 64)]
plain = dl.generate(pair, prompt, "autoregressive", temperature=1.0, seed=7)
print("same text, budgets 0, 8 and 64:", all(run.token_ids == plain.token_ids for run in drawn))
print("emitted tokens a round:", ", ".join(f"{run.mean_emitted_tokens:.2f}" for run in drawn))
print("the text ends:", plain.text.splitlines()[-1])

# %% [markdown]
# So differences between budgets are differences between budgets, not luck. What a temperature does to acceptance, with two
# seeds a prompt:

# %%
print("temperature   chain   tree of 64   (emitted tokens a round)")
for temperature in (0.0, 1.0, 2.0):
    emitted = []
    for method in ("dflash", "ddtree"):
        options = dict(tree_budget=64, temperature=temperature, max_new_tokens=40)
        runs = [
            run
            for seed in (0, 1)
            for run in decode(chat_prompts[:4], method, seed=seed, **options)
        ]
        emitted.append(np.mean([r.num_emitted_tokens for r in rounds_of(runs)]))
    print(f"{temperature:11} {emitted[0]:7.2f} {emitted[1]:12.2f}")

# %% [markdown]
# Temperature 1 costs little, because this target is sure of most of its tokens. Hotter text is less and less what the
# drafter learnt to expect, and acceptance falls for both; a tree cannot help where the target's token is not among the
# drafter's first few.
#
# ## Exercises
#
# **1.** What would `"auto"` do worse if it took the drafter at its word, with a trust of 1 for ever?
#
# <details><summary>Answer</summary>
# Where the dashed line of mass lies above the solid one of acceptance, the drafter is too confident: trees would be too
# large, and it would draft where that does not pay. The ratio of the two lines, over the last rounds, is the trust.
# </details>
#
# **2.** Where does a machine with 32 free rows have its best budget on a text on which every draft is right?
#
# <details><summary>Answer</summary>
# At the depth of the block: the chain is then the whole tree, and accepts all of it. Every further node costs and cannot
# be accepted.
# </details>
#
# **3.** A server decodes for 16 users at once on a GPU with 256 free rows. What budget would you begin with?
#
# <details><summary>Answer</summary>
# The free rows are shared: about 256 / 16 = 16 rows each, so budgets around 15. That is why trees that shine for one user
# are often slower than chains on a busy server.
# </details>
#
# **Next:** [5 · Is it the drafter or the port?](05_is_it_the_drafter_or_the_port.ipynb)
