# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2 · The cache that wasn't
#
# **At the end you will know** what breaks when a tree verifier written for attention meets a hybrid, what the three patches
# that everybody finds do fix, what they leave wrong without a word, and what that does to acceptance.
#
# **Time:** 25 minutes to read, half a minute to run. **Needs:** notebook 1. Words in *italics* are in the
# [glossary](glossary.md).
#
# A true story, told on a small model. [DDTree](https://github.com/liranringel/ddtree) was published for Qwen3, whose layers
# are all attention. Somebody moved it to Qwen3.6-27B, a *hybrid*: three of four layers are recurrent. It crashed; three
# patches later it ran, and wrote 1.67 tokens a round where the paper reports up to 10.7. "The drafter is still under
# training", it was concluded. Let us see.

# %%
from textwrap import fill

import numpy as np
import torch
from matplotlib import pyplot as plt
from transformers import DynamicCache, logging

import ddtree_lab as dl
from ddtree_lab.stages.forward import run_target

logging.set_verbosity_error()  # no word on kernels that a CPU does not have
logging.disable_progress_bar()  # no bar for a file of a few megabytes

pair = dl.load_pair()
# pair = dl.load_pair("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", device_map="auto")
target, drafter = pair.target, pair.drafter
prompt = "A concert starts at 14:30 and takes 3 hours and 30 minutes. When does it end?"
input_ids = pair.encode(prompt)

# %% [markdown]
# ## Patch 1: the cache
#
# The published code makes its cache like this, and so does a lot of code from the time when all layers were alike:

# %%
try:
    run_target(target, input_ids, DynamicCache())  # the model's own forward
except (ValueError, IndexError, AttributeError) as fault:
    print(fill(f"{type(fault).__name__}: {fault}", 96))

# %% [markdown]
# A bare `DynamicCache()` has no layers; it grows attention layers as they are asked for. A hybrid's layers are of two
# kinds, and only the model's config knows which is which. That is patch 1, `DynamicCache(config=…)`, and `make_cache`
# does it.

# %%
cache = dl.make_cache(target)
prefilled = dl.prefill(target, input_ids, cache, drafter.tap_layer_ids)
for layer in dl.describe_cache(cache).layers[:4]:
    shapes = ",  ".join(f"{name} {list(shape)}" for name, shape in layer.shapes.items())
    print(f"layer {layer.layer_idx}  {layer.kind:16}  {shapes}")

# %% [markdown]
# Look at the shapes. The attention layer keeps a row for each of the 37 tokens. The other kind, *Gated DeltaNet*
# ([arXiv 2412.06464](https://arxiv.org/abs/2412.06464)), keeps one matrix a head, whatever the length of the text, and a
# window of a few inputs for its convolution. Every token **overwrites** them. Keep that in mind.
#
# ## Patch 2: the embedding
#
# The drafter borrows the target's embedding, in the published code as `target.model.embed_tokens`. Qwen3.6-27B as it is
# published is a vision model too, and keeps its text model one level deeper. A random model of that kind:

# %%
from ddtree_lab.doctor.targets import small_target

wrapped = small_target("hybrid in a multimodal wrapper")
try:
    wrapped.model.embed_tokens
except AttributeError as fault:
    print("AttributeError:", fault)
print(dl.resolve_embeddings(wrapped))

# %% [markdown]
# Patch 2 asks the model itself: `get_input_embeddings()` and `get_output_embeddings()`, which every model of the library
# answers.
#
# ## Patch 3: the attention back end
#
# The published code insists on flash-attention 2, which takes no mask of one's own: a tree cannot be told to it. So patch 3
# is `attn_implementation="sdpa"`. Under sdpa the mask may be boolean. Under the library's third back end, eager, a boolean
# mask is *added to the scores*, as zeros and ones, and masks nothing:

# %%
anchor = int(prefilled.logits[0, -1].argmax())
context = dl.extend_context(drafter, prefilled.taps[0], token_ids=input_ids[0].tolist())
draft = dl.draft_block(drafter, pair.embeddings, context, anchor)
tree = dl.build_tree(draft.logits, 12, anchor)
mask = dl.build_mask(tree, past_length=input_ids.shape[1])
node_ids = torch.from_numpy(tree.token_ids)[None]


def logits_with(attention_mask):
    forked = dl.fork_cache(cache)  # a copy; the committed one stays clean
    return run_target(
        target, node_ids, forked, attention_mask=attention_mask, position_ids=mask.position_ids
    ).logits[0]


for backend in ("sdpa", "eager"):
    target.set_attn_implementation(backend)
    boolean, additive = logits_with(mask.visible[None, None]), logits_with(mask.additive)
    apart = (boolean - additive).abs().max()
    print(f"{backend:5}: logits with a boolean and an additive mask differ by {apart:.1f}")
target.set_attn_implementation("sdpa")

# %% [markdown]
# An additive mask is right under both. Nothing raised, by the way; that will happen again.
#
# ## It runs
#
# Three patches, and the port runs. This library keeps it as `verify_method="flattened"`, for teaching. Several prompts, the
# same target, the same drafter; *emitted tokens* a round, and whether the text is the one that plain decoding writes:

# %%
chosen = ("default", "units-1", "calendar-1", "facts-1")
prompts = [prompt for prompt in dl.bundled_prompts("chat") if prompt.id in chosen]
plain = [dl.generate(pair, p, "autoregressive", max_new_tokens=60) for p in prompts]


def measure(name, method, verify_method):
    options = dict(tree_budget=16, max_new_tokens=60, verify_method=verify_method)
    runs = [dl.generate(pair, p, method, **options) for p in prompts]
    emitted = np.mean([run.mean_emitted_tokens for run in runs])
    right = sum(run.token_ids == known.token_ids for run, known in zip(runs, plain))
    print(f"{name:26} {emitted:.2f} emitted tokens a round, {right} of {len(runs)} texts right")


measure("chain, exact", "dflash", "auto")
measure("chain, three patches", "dflash", "flattened")
measure("tree of 16, exact", "ddtree", "auto")
measure("tree of 16, three patches", "ddtree", "flattened")

# %% [markdown]
# Two things are off. Acceptance has collapsed, and more so for the tree than for the chain: the better method looks worse.
# And **texts are wrong**, all of the tree's and half of the chain's, which, as notebook 1 said, no drafter can cause. An
# acceptance figure alone blames the drafter; a comparison of texts acquits it in a minute.
#
# ## Where it goes wrong: the sibling leak
#
# Take one tree and verify it both ways, keeping the hidden states after every layer. The flattened pass runs the nodes in
# their order of storage. The mask keeps them apart in attention layers. In a recurrent layer there is no mask: the state
# goes through all nodes, one after the other.

# %%
num_layers = len(dl.describe_cache(cache).layers)
layers = range(num_layers)
exact = dl.verify_tree(target, cache, tree, tap_layer_ids=layers)
naive = dl.verify_tree(target, cache, tree, method="flattened", tap_layer_ids=layers)

off = (naive.logits - exact.logits).abs().amax(-1).cpu()  # by node
hidden = [v.taps.view(tree.num_nodes, num_layers, -1) for v in (exact, naive)]
leak = ((hidden[1] - hidden[0]).norm(dim=-1) / hidden[0].norm(dim=-1)).cpu().T  # layers × nodes

first_wrong = int((off > 1e-2).nonzero()[0])
clean = bool((off[:first_wrong] < 1e-3).all())
print(f"nodes 0 to {first_wrong - 1}: every error below 1e-3: {clean}")
print(f"node {first_wrong}: error {off[first_wrong]:.1f}")
print(f"its parent is node {tree.parents[first_wrong]}, stored before it: {first_wrong - 1}")

# %%
kinds = [
    "DeltaNet" if k.kind == "linear_attention" else "attention"
    for k in dl.describe_cache(cache).layers
]
labels = [f"{i}\n{pair.tokenizer.decode(t)!r}" for i, t in enumerate(tree.token_ids.tolist())]

figure, (top, below) = plt.subplots(
    2, 1, figsize=(8.4, 5.2), sharex=True, height_ratios=(1, 1.7), layout="constrained"
)
top.bar(range(tree.num_nodes), off, color=["#0072B2" if e < 1e-2 else "#D55E00" for e in off])
top.set_ylabel("largest error\nof a logit")
picture = below.imshow(leak, cmap="Oranges", aspect="auto", vmin=0, vmax=1)
below.set_yticks(range(num_layers), [f"{i} {kind}" for i, kind in enumerate(kinds)], fontsize=8)
below.set_xticks(range(tree.num_nodes), labels, fontsize=7)
below.set(xlabel="node, token", ylabel="after layer")
figure.colorbar(picture, ax=below, label="hidden state off by\n(share of its length)")
dl.chart(
    figure,
    "Error of the flattened pass by node and layer: nothing before the first sibling, "
    "large in every layer for every node after it.",
)

# %% [markdown]
# Left of the first sibling the nodes happen to be a chain, and all is well; that is why a quick test with a chain, or a
# look at the first token, finds nothing. From the first sibling on every node is wrong, from the very first layer: its
# state has seen tokens that are not in its past. The attention layers inherit the error and cannot repair it.

# %%
agree = exact.argmax_token_ids == naive.argmax_token_ids
before, after = agree[:first_wrong], agree[first_wrong:]
print("nodes with the same greedy token")
print(f"before the first sibling: {int(before.sum())} of {len(before)}")
print(f"from it on: {int(after.sum())} of {len(after)}")

# %% [markdown]
# Some greedy tokens of this confident little model survive the error. That is the treacherous part: text still looks like
# text.
#
# ## A rollback that isn't
#
# Now the chain, whose verify pass was right. Why are texts of *its* wrong too? Because of what comes after. The target has
# run on rejected tokens, and the cache has to forget them. An attention layer drops rows. What does a state drop?

# %%
rejected = draft.logits.argmax(-1)[None]
past = input_ids.shape[1]


def next_logits(held):
    """What the target says after the anchor, from a copy of that cache."""
    return dl.prefill(target, torch.tensor([[anchor]]), dl.fork_cache(held)).logits[0, -1]


def run_rejected(held):
    run_target(target, rejected, held)
    return held


def report(what, held):
    print(f"{what:45} off by {(next_logits(held) - next_logits(cache)).abs().max():.2f}")


by_hand = run_rejected(dl.fork_cache(cache))
for layer in by_hand.layers:
    if hasattr(layer, "keys"):
        layer.keys, layer.values = layer.keys[:, :, :past], layer.values[:, :, :past]
report("rows of attention layers cut off", by_hand)

cropped = dl.fork_cache(cache)
try:
    cropped.activate_past_recording()
    run_rejected(cropped).crop(-rejected.shape[1])
    report("the library's crop, recording switched on", cropped)
except (RuntimeError, AttributeError) as fault:
    print("the library's crop:", fault)

kept = dl.fork_cache(cache)
run_rejected(dl.fork_cache(kept))
report("the old states kept, and gone back to", kept)

# %% [markdown]
# Cutting rows, which is what the published code does with everything that has `.keys`, leaves the states where the rejected
# tokens took them. The library's own `crop` mends the convolution windows; the recurrent state itself stays wrong. (Older
# versions of the library did nothing here, and said nothing.) There is no way back from a state but to have kept it, or to
# be able to compute the state after any node, as [notebook 3](03_a_tree_through_a_recurrence.ipynb) does.
#
# ## The drafter pays twice
#
# The drafter reads *taps*, hidden states of accepted nodes. Which of these are clean?

# %%
walk = dl.walk_tree(tree, exact.argmax_token_ids.tolist())
print("accepted path:", list(walk.path))
for tapped in drafter.tap_layer_ids:
    by_node = "  ".join(f"{leak[tapped, node]:.2f}" for node in walk.path)
    print(f"tap of layer {tapped}: off by {by_node}")

# %% [markdown]
# The last two accepted nodes came through a sibling, and their taps are wrong by four fifths of their length or more. They
# become the drafter's context, for good. So a wrong port lowers acceptance twice: the target rejects good drafts, and the
# drafter, fed with wrong states, drafts worse ones.
#
# ## What each patch fixed
#
# | patch | turns | into | what stays wrong |
# |---|---|---|---|
# | cache from the config | an exception | a run | states run through siblings, never rewind |
# | `get_input_embeddings()` | an exception | a run | nothing; this one is complete |
# | sdpa | an exception | a run | a boolean mask under eager |
# | *(none)* | | | **the recurrence is a chain, and the draft is a tree** |
#
# Every patch took an exception away, and the exceptions were the only part of the problem that could be seen.
# [Notebook 5](05_is_it_the_drafter_or_the_port.ipynb) has the tool for the part that cannot.
#
# ## Exercises
#
# **1.** Which targets does the flattened pass verify exactly?
#
# <details><summary>Answer</summary>
# Those with attention layers only: there the mask is all the structure a tree has. Try <code>small_target("dense")</code>
# in place of the target, with random token ids.
# </details>
#
# **2.** The exact chain and the patched chain agree in their first round. Find the round in which they part.
#
# <details><summary>Answer</summary>
# Run both with <code>record=True</code> and look at <code>dl.view((a, b))</code>. They part in the first round after one
# that rejected a draft: until then there was nothing to roll back.
# </details>
#
# **3.** Somebody proposes to order the nodes so that the most probable path comes first. Does that repair the leak?
#
# <details><summary>Answer</summary>
# No. It makes the first path right, as here, and every other node wrong; the tree is then a chain with decoration. Since
# the states are not rewound either, the next round begins wrong as well.
# </details>
#
# **Next:** [3 · A tree through a recurrence](03_a_tree_through_a_recurrence.ipynb)
