# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7 · Port your own
#
# **At the end you will know** how to make a recurrent layer that this package has never seen run on a draft tree in one
# pass: what a port is, how to write one in twenty lines, and how the doctor tells you which half of it is still wrong.
#
# **Time:** 40 minutes to read, under half a minute to run. **Needs:** notebooks 3 and 5. Words in *italics* are in the
# [glossary](glossary.md).
#
# The layer is made up here: *gated linear attention*, a relative of the delta rule that does not look before it writes.
# For your own model the steps are the same, in the same order.

# %%
from textwrap import fill

import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

import ddtree_lab as dl
from ddtree_lab.compat import get_state, iter_states, set_state

logging.set_verbosity_error()  # no word on kernels that a CPU does not have
logging.disable_progress_bar()  # no bar for a file of a few megabytes

# %% [markdown]
# ## A new mixer
#
# One head keeps a state `S`. A token decays it by `a`, adds `k vᵀ`, and reads with `q`:
#
# ```
# S' = a S + k vᵀ
# o  = S'ᵀ q
# ```
#
# Like any recurrent layer of transformers it keeps its state in the model's cache, in the layer that belongs to its
# `layer_idx`, and goes on from there when it is called again.


# %%
class GatedLinearAttention(nn.Module):
    def __init__(self, hidden_size, layer_idx, heads=2):
        super().__init__()
        self.layer_idx, self.heads = layer_idx, heads
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )
        self.decays = nn.Linear(hidden_size, heads)

    def project(self, x):
        """q, k, v of [..., head, width] and the decay a of [..., head], between 0 and 1."""
        parts = self.queries(x), self.keys(x), self.values(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        return q, k, v, self.decays(x).sigmoid()

    def held(self, cache):
        """The states in the cache: none before the prompt."""
        layers = [] if cache is None else [cache.layers[self.layer_idx]]
        return [state for layer in layers for _, _, state in iter_states(layer)]

    def forward(self, hidden_states, cache=None, cache_params=None, **kwargs):
        cache = cache_params if cache is None else cache  # its name before transformers 5.24
        q, k, v, a = self.project(hidden_states)  # [batch, token, head, …]
        nothing = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :])
        S, *_ = *self.held(cache), nothing
        outputs = []
        for t in range(q.shape[1]):
            S = a[:, t, :, None, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
            outputs.append((q[:, t, :, None] @ S).flatten(1))
        if cache is not None:
            layer = cache.layers[self.layer_idx]
            layer.dtype, layer.device = (
                S.dtype,
                S.device,
            )  # older ones learn it from a convolution
            cache.update_recurrent_state(S, self.layer_idx)
        return self.out(torch.stack(outputs, 1))


# %% [markdown]
# ## A model around it
#
# Three of the new layers to one of attention, in the shell of a Qwen3.5 that lends its embedding, MLPs and norms. The
# weights are random, scaled up so that the layers do something: the text will mean nothing, and an exact port is exact on
# nonsense too. The n-gram drafter needs no training: it drafts what followed the last tokens when they occurred before.

# %%
torch.manual_seed(0)
config = Qwen3_5TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, eos_token_id=None,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
)  # fmt: skip
target = Qwen3_5ForCausalLM(config).eval()
for i, kind in enumerate(config.layer_types):
    if kind == "linear_attention":
        target.model.layers[i].linear_attn = GatedLinearAttention(config.hidden_size, i)
with torch.no_grad():
    for weight in target.parameters():
        weight.mul_(4 if weight.ndim == 2 else 1)
    target.lm_head.weight.mul_(5)

pair = dl.Pair(target, dl.NgramDrafter(), name="toy")
prompt = [*range(5, 20), *range(5, 20), 5, 6, 7]
dl.describe_cache(target)

# %% [markdown]
# The cache factory reads `layer_types` of the config: the new layers are given a cache layer that keeps a state, and a
# state can only be undone with a *snapshot*.
#
# ## Before there is a port
#
# The model already runs, every method included. Where a recurrent layer has no port, `method="auto"` takes *paths*: each
# root-to-leaf path is a row of a batch over a copy of the cache. Any architecture, no port, exact.

# %%
plain = dl.generate(pair, prompt, method="autoregressive", max_new_tokens=30)
drafted = dl.generate(pair, prompt, tree_budget=16, max_new_tokens=30)
print("the same text:", drafted.token_ids == plain.token_ids)

cache = dl.Session(pair, prompt).state.cache  # holds the prompt
made_up = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)) * 3
tree = dl.build_tree(made_up, budget=12, root_token_id=8)
print("verified by:", dl.verify_tree(target, cache, tree).method)

# %% [markdown]
# One pass over the tree is refused, and the refusal says what to do:

# %%
try:
    dl.verify_tree(target, cache, tree, "tree")
except ValueError as refusal:
    print(fill(str(refusal), 96))

# %% [markdown]
# What would it have done? `"flattened"` is the port that passes the mask and hopes. The doctor, on a port of that kind:


# %%
def problems(report):
    """The problems that the doctor can pin to layers, and the names of the others."""
    found = [finding for finding in report.findings if finding.status == "problem"]
    lines = [f"{f.check}, layers {list(f.layers)}: {f.symptom}" for f in found if f.layers]
    lines.append("also " + ", ".join(f.check for f in found if not f.layers))
    for line in lines:
        print(fill(line, 96, initial_indent="✗ ", subsequent_indent="  "))


problems(dl.diagnose(pair, dl.TransformersPort(pair, "flattened"), prompt=prompt))

# %% [markdown]
# ## What a port is
#
# The word has two sizes. In notebook 5 a port is a whole loop; this package has that loop, and what it lacks for a new
# layer is the layer's own part, which is called its port too: an object with one method. It is given the module (for its
# weights), the hidden states of the nodes, the layer's cache with the committed state, and the shape of the tree. It
# returns two things:
#
# * what the module would answer for each node if the node's path were the only text, and
# * *factors*: whatever it needs to put the state after any path into the cache, should that path be committed.
#
# It must not write the cache. Both halves are specified in
# [`recurrent/ports.py`](../ddtree_lab/recurrent/ports.py); a class with the right method is enough, there is nothing to
# inherit.
#
# ## The algebra, before the code
#
# Unroll the recurrence along a path, as in notebook 3. With `G[i]` the sum of `log a` from the root to `i`, and `D[i, j]`
# the decay `exp(G[i] − G[j])` where `j` is `i` or above it and 0 elsewhere:
#
# ```
# o[i] = exp(G[i]) S_0ᵀ q[i] + Σ D[i, j] (q[i] · k[j]) v[j]      over all j
# ```
#
# The delta rule needed a solve here, because what a token writes depended on what was there. This layer writes `k vᵀ`
# whatever is there, so the masked product is everything.
#
# ## First try
#
# The sum over nodes, and a commit that adds up the nodes of the tree:


# %%
class Factors:
    """What is left of a pass: keys and values of the nodes, their decays, the state below the tree."""

    def __init__(self, k, v, G, S_0):
        self.k, self.v, self.G, self.S_0 = k, v, G, S_0

    def state_after(self, nodes):
        G = self.G[:, nodes]  # [head, node]
        weight = (G[:, -1:] - G).exp()[..., None]
        written = (self.k[:, nodes] * weight).mT @ self.v[:, nodes]
        return G[:, -1].exp()[:, None, None] * self.S_0 + written

    def commit(self, layer, path):
        everything = list(range(self.G.shape[1]))
        set_state(layer, "recurrent_states", self.state_after(everything)[None])


class FirstTry:
    def forward(self, module, hidden_states, layer, topology, scan):
        q, k, v, a = module.project(hidden_states[0])  # [node, head, …]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [head, node, width]
        visible = topology.ancestors(q.device).to(q.dtype)  # [node, node]
        G = a.log().T @ visible.T  # [head, node]
        D = ((G[..., :, None] - G[..., None, :]) * visible).exp() * visible

        outputs = (D * (q @ k.mT)) @ v
        S_0 = get_state(layer, "recurrent_states")[0]
        return module.out(outputs.transpose(0, 1).flatten(1))[None], Factors(k, v, G, S_0)


dl.register_port(GatedLinearAttention, FirstTry())

# %% [markdown]
# Is it right? The package does not take our word for it. Before it uses a port on a model it runs a small trial against the
# paths alone; this one fails, and `"auto"` stays with paths. A wrong port cannot change a text.

# %%
print("verified by:", dl.verify_tree(target, cache, tree).method)
try:
    dl.verify_tree(target, cache, tree, "tree")
except ValueError as refusal:
    print(fill(str(refusal), 96))

# %% [markdown]
# To see *what* is wrong, let the doctor look at it all the same. `unchecked=True` runs the pass although the trial failed.

# %%
report = dl.diagnose(pair, dl.TransformersPort(pair, "tree", unchecked=True), prompt=prompt)
problems(report)

# %% [markdown]
# The first two lines name the two faults; the others are what comes of them. `layer_by_layer` gives each layer clean
# input and still gets wrong answers from the three new layers, *from the root on*. The root has no ancestors, so it is
# not the mask; it is what lies below the tree. We have left out `exp(G) S_0ᵀ q`: the layer starts from nothing. And
# `recurrent_states` is wrong whatever is accepted: our commit takes in every node, also the rejected ones.
#
# ## Second try
#
# First the outputs. Each fault on its own, so that each fix can be seen to work.


# %%
class SecondTry:
    def forward(self, module, hidden_states, layer, topology, scan):
        q, k, v, a = module.project(hidden_states[0])
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        visible = topology.ancestors(q.device).to(q.dtype)
        G = a.log().T @ visible.T
        D = ((G[..., :, None] - G[..., None, :]) * visible).exp() * visible

        S_0 = get_state(layer, "recurrent_states")[0]
        outputs = (D * (q @ k.mT)) @ v
        outputs += G.exp()[..., None] * (q @ S_0)  # what the committed text still says
        return module.out(outputs.transpose(0, 1).flatten(1))[None], Factors(k, v, G, S_0)


dl.register_port(GatedLinearAttention, SecondTry())
problems(dl.diagnose(pair, dl.TransformersPort(pair, "tree", unchecked=True), prompt=prompt))

# %% [markdown]
# `layer_by_layer` is silent now: every layer's answers are right. What is left is in the commit stage and after it. Note
# what the package's trial says of this port: nothing, for it compares one pass, and this pass is right. **A port is two
# halves, and a test of the logits sees one of them.**
#
# ## Third try
#
# Commit the accepted path and only that. A new tensor goes into the cache; the old one stays as it was for whoever holds
# it, such as a session that steps back.


# %% tags=["varies"]
class PathFactors(Factors):
    def commit(self, layer, path):
        set_state(layer, "recurrent_states", self.state_after(list(path))[None])


class GatedLinearPort(SecondTry):
    def forward(self, module, hidden_states, layer, topology, scan):
        outputs, left = super().forward(module, hidden_states, layer, topology, scan)
        return outputs, PathFactors(left.k, left.v, left.G, left.S_0)


dl.register_port(GatedLinearAttention, GatedLinearPort())
report = dl.diagnose(pair, dl.TransformersPort(pair, "tree"), prompt=prompt)
report

# %% [markdown]
# Silent: no `unchecked`, no problem. What is skipped belongs to parts this pair does not have (a DFlash drafter, a
# convolution, sliding windows).
#
# ## What it is good for
#
# The tree pass is now what `"auto"` takes, and the text is the same as before.

# %%
found = dl.verify_tree(target, cache, tree)
oracle = dl.verify_tree(target, cache, tree, "paths")
print("verified by:", found.method)
close = torch.allclose(found.logits, oracle.logits, atol=1e-3)
print("logits equal to the paths alone:", close)
again = dl.generate(pair, prompt, tree_budget=16, max_new_tokens=30)
print("the same text:", again.token_ids == plain.token_ids)

# %% [markdown]
# In passes and copies: one pass of 13 rows, where paths needs a row of its own and a copy of the cache for each leaf.

# %%
paths = [tree.path(leaf) for leaf in tree.leaves()]
print(f"tree:  {tree.num_nodes} rows, no copy of a state")
print(f"paths: {len(paths)} × {max(map(len, paths))} rows, {len(paths)} copies of every state")

# %% [markdown]
# For a layer of your own in a real model the cells are the same, with your module's class and your pair:
#
# ```python
# # Or your own target with the drafter "ngram".
# pair = dl.load_pair("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", device_map="auto")
# dl.register_port(YourMixer, YourPort())
# dl.diagnose(pair, dl.TransformersPort(pair, "tree", unchecked=True))
# ```
#
# ## Exercises
#
# **1.** The argument `scan` asks for the naive way, node by node. Our port ignores it. Write it, and compare the two.
#
# <details><summary>Answer</summary>
#
# ```python
# class WithScan(GatedLinearPort):
#     def forward(self, module, hidden_states, layer, topology, scan):
#         outputs, left = super().forward(module, hidden_states, layer, topology, scan)
#         if scan:
#             q, k, v, a = module.project(hidden_states[0])
#             states = []
#             for i, parent in enumerate(topology.parents):
#                 S = left.S_0 if parent < 0 else states[parent]
#                 states.append(a[i, :, None, None] * S + k[i, :, :, None] * v[i, :, None, :])
#             outputs = module.out(torch.stack([(q[i, :, None] @ S).flatten() for i, S in enumerate(states)]))[None]
#         return outputs, left
#
# dl.register_port(GatedLinearAttention, WithScan())
# scanned = dl.verify_tree(target, cache, tree, "scan")
# print(torch.allclose(scanned.logits, oracle.logits, atol=1e-3))
# ```
#
# It is worth having: when a fast port is wrong, the naive twin tells whether the algebra is or the code.
#
# </details>
#
# **2.** Make the decay depend on the *previous* token, as some layers do with a token shift: `a` is computed from the row
# before. What does the port need that it does not have?
#
# <details><summary>Answer</summary>
#
# A second state: the last hidden state of the committed text, kept in the cache beside `S`; and for each node the row of
# its *parent*, for the root the committed one. `topology.conv_columns(2, device)` gives exactly these columns, for a
# shift is a convolution with two taps. The factors then have to commit it too.
#
# </details>
#
# **3.** `hidden_states` come in bfloat16 on a real model. Which of the port's numbers should not?
#
# <details><summary>Answer</summary>
#
# `G`, `D` and the state: sums of many logarithms and sums over the whole text. `GatedDeltaPort` raises them to float32,
# as the library's own kernels do. A state rounded to half precision is read by every later token.
#
# </details>
#
# **Next:** [8 · The 27B](08_the_27b.ipynb).
