# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5 · Is it the drafter or the port?
#
# **At the end you will know** how to find out why acceptance is low: what separates a weak drafter from a wrong port, how
# the doctor finds the stage and the layers, and what its findings look like on your own loop.
#
# **Time:** 25 minutes to read, about a minute to run. **Needs:** notebooks 1 and 2. Words in *italics* are in the
# [glossary](glossary.md).
#
# Three people have the same problem: a target, a drafter, and fewer than two tokens a round where they had hoped for six.

# %%
import copy
import inspect
import sys
from textwrap import dedent, fill

import torch
from matplotlib import pyplot as plt
from transformers import logging

import ddtree_lab as dl
from ddtree_lab.doctor.bugs import BUGS, BuggyPort
from ddtree_lab.doctor.diagnose import examine, material_for
from ddtree_lab.view.chart import BLUE, GREEN, GREY, ORANGE

logging.set_verbosity_error()  # no word on kernels that a CPU does not have
logging.disable_progress_bar()  # no bar for a file of a few megabytes

pair = dl.load_pair()
# pair = dl.load_pair("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", device_map="auto")

# %% [markdown]
# A *port* is an implementation of `prefill`, `draft`, `verify` and `commit` for one engine and one architecture. The
# library has one of its own; for this notebook, and for its tests, it can make known mistakes with it, one switch each.
#
# Ada's port has one of them, Ben's has another. Cleo's port is the clean one, but her drafter was hardly trained: here,
# the good one with noise on its weights.

# %%
noisy = copy.deepcopy(pair.drafter)
noise = torch.Generator().manual_seed(0)
with torch.no_grad():
    for weight in noisy.parameters():
        if weight.ndim >= 2:
            weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=noise)
cleos_pair = dl.Pair(pair.target, noisy, pair.tokenizer, name="Cleo's pair")

ports = {
    "Ada": (pair, BuggyPort(pair, [BUGS["flattened_recurrence"]])),
    "Ben": (pair, BuggyPort(pair, [BUGS["wrong_mask_id"]])),
    "Cleo": (cleos_pair, dl.TransformersPort(cleos_pair)),
}
print(len(BUGS), "known mistakes, among them:", ", ".join(list(BUGS)[:4]))

# %% [markdown]
# ## The same figure three times
#
# The doctor tries a port on a few prompts. What it knows of it is what everybody measures first:

# %%
material = {"embedded": material_for(pair), "Cleo's pair": material_for(cleos_pair)}
reports = {name: examine(material[p.name], port) for name, (p, port) in ports.items()}


def finding(report, check):
    return next(f for f in report.findings if f.check == check)


for name, report in reports.items():
    text = "right" if finding(report, "greedy_text").status == "ok" else "wrong"
    print(f"{name:4}  text {text}, {finding(report, 'acceptance').symptom}")

# %% [markdown]
# The first number of each line is the port's, and all three are below two. The second one is new: what the *drafter* gives
# **on clean states**. It is measured with everything of the port's taken away: the target runs alone over its own text, the
# drafter reads true hidden states, and one counts what a walk would have accepted. If the two numbers agree, the port loses
# nothing. If the first is lower, the difference is the port's.
#
# For Cleo they agree, as far as a few rounds can tell. The drafter can do no more. And a text is *right* if it is the
# target's own, token by token. Together that is enough for a verdict:

# %%
for name, report in reports.items():
    print(fill(f"{name}: {report.verdict}", 96), end="\n\n")

# %% [markdown]
# ## Where in the block it is lost
#
# Acceptance by depth says more than its mean: of the drafts that were reached at a depth, the share that was kept.

# %%
clean = examine(material["embedded"])
lines = {"clean port": (clean, GREY, "o"), "Ada": (reports["Ada"], ORANGE, "s")}
lines |= {"Ben": (reports["Ben"], BLUE, "^"), "Cleo": (reports["Cleo"], GREEN, "D")}

figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name, (report, color, marker) in lines.items():
    kept = report.acceptance["port_by_depth"]
    axes.plot(range(1, len(kept) + 1), kept, color=color, marker=marker, ms=5, label=name)
axes.set(
    xlabel="depth in the block", ylabel="drafts kept, of those reached", ylim=(-0.03, 1.03)
)
figure.legend(frameon=False, loc="outside right center")
dl.chart(
    figure, "Share of drafts kept at each depth, for the clean port and the three low ones."
)

# %% [markdown]
# The clean port keeps three of four first drafts, and nearly all that come after them. The three others all fall short from
# the first depth on, each in its way. Curves like these are a hint; at fewer than two tokens a round only a few rounds
# reach the deeper places. What proves something is a comparison of each stage with the truth, and that is what the doctor's
# checks are.
#
# ## What a finding says
#
# Ada's port, in the doctor's words:


# %%
def tell(found):
    layers = f", layers {list(found.layers)}" if found.layers else ""
    print(f"check:   {found.check}, stage {found.stage}{layers}")
    for label in ("symptom", "cause", "fix"):
        print(fill(f"{label + ':':9}{getattr(found, label)}", 96, subsequent_indent=" " * 9))
    print(f"known as {', '.join(found.bugs)}\n")


for found in reports["Ada"].problems:
    tell(found)

# %% [markdown]
# The check gave every layer *clean* input and looked at its answer alone, so that an error cannot travel, and no layer is
# blamed for what came before it. What it saw, by layer and node:

# %% tags=["varies"]
dl.view(reports["Ada"]).picture()

# %% [markdown]
# The recurrent layers answer wrongly from the first sibling on, the attention layers are right. Compare with the picture in
# [notebook 2](02_the_cache_that_wasnt.ipynb), where the error does travel.
#
# One cause, and many checks that fail. The doctor does not list as many problems: it makes the supposed mistake on the
# *clean* port, and what then fails with the very same numbers follows from it.

# %%
followed = [f for f in reports["Ada"].findings if "follows from" in f.symptom]
print(f"{len(followed)} more checks fail, for example {followed[0].check}:")
print(fill(followed[0].symptom, 96))

# %% [markdown]
# And Ben's:

# %%
for found in reports["Ben"].problems:
    tell(found)

# %% [markdown]
# His text was right all the time, which is the first thing to look at:
#
# | text | acceptance | so it is |
# |---|---|---|
# | wrong | low | the port, in *verify* or *commit* (Ada) |
# | wrong | fine | the port, in the *walk* or at the end of the text |
# | right | low, and lower than the drafter's own | the port, on the *draft* side: taps, context, block (Ben) |
# | right | low, and the drafter's own | the drafter (Cleo) |
#
# ## Your own loop
#
# Here is a loop as people really write it, with the three patches of notebook 2. It is in
# [examples/my_port.py](../examples/my_port.py); this is its commit:

# %%
sys.path.insert(0, "..")  # the repository, where examples/ is
from examples.my_port import MyPort

print(dedent(inspect.getsource(MyPort.commit)))

# %%
# The same as dl.diagnose(pair, port=MyPort(pair)), on prompts that are prepared already.
mine = examine(material["embedded"], MyPort(pair))
print(fill(mine.verdict, 96), end="\n\n")
for found in mine.problems:
    tell(found)

# %% [markdown]
# Three methods are all the doctor needs: `prefill`, `verify` and `commit`. With `draft` it examines the draft side too,
# with `cache` it looks at layers, with `generate` at whole texts. What it could not examine, it says:

# %%
skipped = [f for f in mine.findings if f.status == "skipped"]
print(f"{len(skipped)} of {len(mine.findings)} checks skipped, for example")
for f in skipped[1:3]:
    print(f"  {f.check}: {f.symptom}")

# %% [markdown]
# From the command line:
#
# ```console
# ddtree-lab doctor --port examples.my_port:MyPort --html report.html
# ddtree-lab doctor --inject wrong_mask_id         # a known mistake, to see what it looks like
# ddtree-lab doctor --list-bugs
# ```
#
# ## Mistakes that hide
#
# Not every mistake lowers acceptance. Of these two, neither does; the first does not even change the texts tried here. It
# is found all the same, because the checks look at rows and states and not at outcomes:

# %%
few = ["layer_by_layer", "recurrent_states", "greedy_text", "acceptance"]  # checks, by name
for name in ("state_not_rolled_back", "bonus_from_parent"):
    report = examine(material["embedded"], BuggyPort(pair, [BUGS[name]]), few)
    top = report.problems[0]
    print(f"{name}\n  greedy text: {finding(report, 'greedy_text').status}")
    print(f"  {finding(report, 'acceptance').symptom}")
    print(f"  found by {top.check} ({top.stage}) as {', '.join(top.bugs)}\n")

# %% [markdown]
# ## When rounding decides
#
# One caution. A batched pass and a one-row pass differ in their last bits, and where two logits nearly tie, the greedy
# token may flip. That is no mistake of anybody's. There is no safe cut-off, so the doctor measures, without any drafter,
# how far two right ways of scoring the same text differ on this target, and allows what rounding explains:

# %% tags=["varies"]
print(fill(finding(clean, "near_ties").symptom, 96))

# %% [markdown]
# ## Exercises
#
# **1.** Mend `MyPort` until the doctor is silent. The library's stages may be used.
#
# <details><summary>Answer</summary>
# Let <code>verify</code> call <code>dl.verify_tree(model, cache, tree)</code>, keep the verification in the state, and let
# <code>commit</code> call <code>dl.commit_path(model, cache, verification, path)</code>. Both mistakes go at once: the
# recurrence runs on the tree, and the pass leaves the cache as it was.
# </details>
#
# **2.** Your acceptance falls from 4 to 1.3 as the text grows past some thousands of tokens; texts are right. Where do you
# look?
#
# <details><summary>Answer</summary>
# Right texts: not in verify or commit. So the draft side, and what depends on length there: the drafter's context (are rows
# missing, or kept twice?), its positions, the window of its sliding layers. Or the drafter itself was trained on short
# texts; its acceptance on clean states, at that length, decides.
# </details>
#
# **3.** Switch on two mistakes at once, `BuggyPort(pair, [BUGS["tap_off_by_plus_one"], BUGS["conv_by_index"]])`. Are both
# named?
#
# <details><summary>Answer</summary>
# Yes, one on the draft side and one in verify: the checks of one stage are given clean input from the others.
# </details>
#
# **Next:** [6 · Verifiers compared](06_verifiers_compared.ipynb)
