# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8 · The 27B
#
# **At the end you will know** what Qwen3.6-27B and its drafter look like from inside, whether they fit where you are, how
# to rehearse everything without their weights, and what to look at first when they have run.
#
# **Time:** 20 minutes to read, about a minute to run. **Needs:** notebooks 1 to 6 help; no weights. Words in *italics*
# are in the [glossary](glossary.md).
#
# Nothing here is downloaded. The published *configs* are part of the package, and a config is enough for most questions.
# Where weights would be needed, a stand-in takes their place, and the last part says which cells change with the real ones.

# %%
import tempfile
from dataclasses import replace
from textwrap import fill

import numpy as np
from matplotlib import pyplot as plt
from transformers import logging

import ddtree_lab as dl
from ddtree_lab.records import format_bytes
from ddtree_lab.view.chart import BLUE, GREEN, ORANGE

logging.set_verbosity_error()  # no word on kernels that a CPU does not have
logging.disable_progress_bar()  # no bar for a file of a few megabytes

# %% [markdown]
# ## What it is made of
#
# `inspect_model` builds the model without weights and looks at it; on the command line it is
# `ddtree-lab inspect qwen3.6-27b`.

# %%
model = dl.inspect_model("qwen3.6-27b")
model

# %% [markdown]
# Read the last table first: of 64 layers only 16 keep rows that can be cropped. The other 48 keep a state, and everything
# this package is about follows from that line.
#
# A state has the same size for ten tokens as for ten thousand. So which of the two weighs more depends on the length of the
# text:

# %%
recurrent = model.recurrent_bytes + model.conv_bytes
even = recurrent / model.kv_bytes_per_token
print("keys and values:", format_bytes(model.kv_bytes_per_token), "a token")
print(f"recurrent: {format_bytes(recurrent)} at any length, the rows of {even:,.0f} tokens")

# %% [markdown]
# ## Why a round must not copy states
#
# A draft tree multiplies what is kept. One state for each node, as a scan would keep it, against what the triangular
# solve of notebook 3 leaves: keys, updates and decays. `plan_memory` knows the latter from a rehearsal of the pass on a
# device that allocates nothing.

# %%
plan = dl.plan_memory("qwen3.6-27b", memory=["48GB", "48GB"], tree_budget=64)
budgets = np.array([16, 32, 64, 128, 256])
factors_a_node = plan.needs.verify.factors / 65

figure, axis = plt.subplots(figsize=(5.6, 3.0))
for size, colour, marker, label in (
    (model.recurrent_bytes, ORANGE, "s", "a state a node"),
    (factors_a_node, BLUE, "o", "factors"),
):
    axis.loglog(budgets, (budgets + 1) * size / 2**30, color=colour, marker=marker, label=label)
weights = model.num_bytes["bfloat16"] / 2**30
axis.axhline(weights, color=GREEN, linestyle="--", label="all weights, bfloat16")
axis.set_xticks(budgets, budgets), axis.minorticks_off(), axis.grid(alpha=0.3)
axis.set_xlabel("tree budget"), axis.set_ylabel("GiB"), axis.set_ylim(top=150)
axis.legend(frameon=False, fontsize=9)
dl.chart(figure, "memory of a state a node and of the factors, by budget, beside the weights")

# %% [markdown]
# ## Does it fit?
#
# The same plan as a table: every quantization, what goes on which card, what the widest stage of a round needs, and the
# call that loads it like that. On the command line: `ddtree-lab plan qwen3.6-27b --memory 48GB,48GB`.

# %%
plan

# %% [markdown]
# Other cards are another list. One of 24 GB:

# %%
small = dl.plan_memory("qwen3.6-27b", memory=["24GB"])
for placement in small.placements:
    verdict = "fits" if placement.fits else "does not fit"
    print(f"{placement.name:>5}: needs {format_bytes(placement.needed):>8}, {verdict}")

# %% [markdown]
# ## A rehearsal
#
# `synthesise` writes a pair with random weights in exactly the layout in which the real one is published, small enough
# for a laptop: same architecture, same pattern of layers, same files. Whatever can go wrong in loading goes wrong here
# first.

# %%
folder = tempfile.TemporaryDirectory()
dl.synthesise("qwen3.6-27b", folder.name, scale="tiny")

REAL = False  # True: the published weights, from the hub
if REAL:
    pair = dl.load_pair("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", device_map="auto")
else:
    pair = dl.load_pair(f"{folder.name}/target", f"{folder.name}/drafter", dtype="float32")

kinds = [layer.kind for layer in dl.describe_cache(pair.target).layers]
counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
print(type(pair.target).__name__, "with", counts)
print("taps", pair.drafter.tap_layer_ids, "block", pair.drafter.config.block_size)

# %% [markdown]
# The first question about a pair that loads is not how fast it is. It is whether one pass over a tree is exact on *this*
# model with *this* attention back end, and whether the three methods write one text.

# %%
prompt = "Which three numbers follow 11, 13, 15, 17?" if REAL else list(range(40, 72))
runs = {
    "plain": dl.generate(pair, prompt, method="autoregressive", max_new_tokens=24),
    "chain": dl.generate(pair, prompt, method="dflash", max_new_tokens=24),
    "tree 32": dl.generate(pair, prompt, tree_budget=32, max_new_tokens=24),
}
for name, run in runs.items():
    same = "the same text" if run.token_ids == runs["plain"].token_ids else "ANOTHER TEXT"
    print(f"{name:>8}: {run.mean_emitted_tokens:.2f} emitted tokens a round, {same}")

# %% [markdown]
# The stand-in's drafter is random, so next to nothing is accepted and a round emits the one token that is the target's
# own. That is right: a drafter can cost time, it cannot cost correctness. (The stand-in runs in float32. Random weights
# make near ties everywhere, and in bfloat16 those may fall one way or the other: exercise 4.) `ddtree-lab run --target …
# --drafter …` prints this table with speeds, and exits 1 if a text differs.
#
# And the stages of a round, one by one, as in notebook 1:

# %%
session = dl.Session(pair, prompt, tree_budget=32)
session.run(rounds=1)
for stage, record in session.records.items():
    print(fill(f"{stage:>6}: {record!r}", 96, subsequent_indent=" " * 8))

# %% [markdown]
# ## Reading a recorded run
#
# With `record=True` (or `run --trace round.json`) every round is kept as plain data: the tree, the target's choice at each
# node, the path. A trace is opened without a model and without torch, so a run on the big machine is read on the small one.
# Here the embedded pair, which is trained, stands in for it.

# %%
embedded = dl.load_pair()
task = dl.bundled_prompts("chat")[3]
trace = dl.generate(embedded, task, tree_budget=32, max_new_tokens=60, record=True).trace
trace.save(f"{folder.name}/round.json")

trace = dl.Trace.load(f"{folder.name}/round.json")
print(task.text, "\n")
print(trace.text)

# %% [markdown]
# First look at the rounds as a list. *Emitted tokens* are what a round adds to the text; their mean is the τ of the papers,
# one more than *accepted drafts*. *Mass* is how many drafts the drafter itself expected to be kept.

# %%
print("round  drafted  mass  accepted  emitted")
for number, one in enumerate(trace.rounds, 1):
    row = f"{number:>5}  {one.tree.num_drafted:>7}  {one.tree.mass:>4.1f}"
    print(f"{row}  {one.num_accepted_drafts:>8}  {one.num_emitted_tokens:>7}")
emitted = [one.num_emitted_tokens for one in trace.rounds]
print(f"mean emitted tokens a round: {np.mean(emitted):.2f}")

# %% [markdown]
# Then at the worst round: where did the tree not have the target's token? In the picture the path is kept as far as it
# goes; the star is the target's own token, which no draft had.

# %%
worst = int(np.argmin([one.num_accepted_drafts - one.tree.depth for one in trace.rounds[:-1]]))
one = trace.rounds[worst]
end = one.path[-1]
said, known = trace.text_of(one.emitted_token_ids[-1]), np.exp(one.target_log_probs[end])
last = trace.text_of(int(one.tree.token_ids[end]))
print(f"round {worst + 1} stops below node {end}, {last!r}")
print(f"the target says {said!r} with probability {known:.2f}")
print("drafted there:", [trace.text_of(token) for token in one.tree.children(end)])

# %%
dl.view(replace(trace, rounds=(one,)))  # this round alone; dl.view(trace) steps through all

# %% [markdown]
# ## With the real weights
#
# Set `REAL = True` above; the cells of the rehearsal stay as they are. In this order:
#
# 1. **Same text?** If not, stop. Two first choices that are a hair apart may swap in bfloat16, as between any two batch
#    sizes; anything else is a port's fault. `dl.diagnose(pair)` tells which (notebook 5).
# 2. **Emitted tokens a round, chain and tree.** For three related pairs the [authors of
#    DDTree](https://github.com/liranringel/ddtree) report 5.2 to 8.0 for the chain on mathematics and code and 2.2 to 4.4
#    on open chat, and more for the tree. Chain far below that: suspect the taps and the drafter's context. Tree below
#    chain: suspect the recurrent layers.
# 3. **Only then speed.** A tree costs more rows than a chain, and whether they are free depends on the machine (notebook 4).
#
# Commands, cards and what was really run are in [docs/27b.md](../docs/27b.md).
#
# ## Exercises
#
# **1.** The chain's block is 16, so a tree is at most 15 deep. How many GiB would snapshots take for a *chain* of that
# depth, and how many factors?
#
# <details><summary>Answer</summary>
#
# ```python
# print(format_bytes(16 * model.recurrent_bytes), format_bytes(16 * factors_a_node))
# ```
#
# Even a chain is worth it: a rollback by snapshots keeps a state for every row it may have to go back to.
#
# </details>
#
# **2.** At 16,000 tokens of context, what is the largest single item of memory on two 48 GB cards, after the weights?
#
# <details><summary>Answer</summary>
#
# ```python
# dl.plan_memory("qwen3.6-27b", memory=["48GB", "48GB"], context=16_000)
# ```
#
# The prefill's working memory, if the whole prompt is run in one pass. It grows with the text, as keys and values do; the
# recurrent states do not.
#
# </details>
#
# **3.** Inspect a sibling that is a mixture of experts, `qwen3.6-35b-a3b`. What changes for the tree pass?
#
# <details><summary>Answer</summary>
#
# ```python
# dl.inspect_model("qwen3.6-35b-a3b")
# ```
#
# Nothing: the experts are in the MLPs, which look at one row at a time. The pattern of layers is the same, and the
# drafter taps other layers.
#
# </details>
#
# **4.** Load the stand-in with `dtype="bfloat16"` and run the three methods again. If a text differs, is the port wrong?
#
# <details><summary>Answer</summary>
#
# ```python
# half = dl.load_pair(f"{folder.name}/target", f"{folder.name}/drafter", dtype="bfloat16")
# print(dl.diagnose(half, checks=["near_ties", "layer_by_layer", "recurrent_states", "greedy_text"]))
# ```
#
# Look at the gap between the first two choices where the texts part, and at what rounding explains there; the doctor
# measures both. A flip inside what rounding explains is innocent, and no verifier can avoid it.
#
# </details>
#
# **The end.** Back to the [table of contents](README.md).
