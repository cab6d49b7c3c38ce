# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 · A tree through a recurrence
#
# **At the end you will know** how a recurrent layer can run a whole draft tree in one pass and be exact at every node:
# the delta rule from one token to a chain, from a chain to a tree, and from a loop over nodes to one triangular solve.
# Every formula is checked against the loop right below it.
#
# **Time:** 40 minutes to read, a few seconds to run. **Needs:** nothing but the package; the last section loads the
# embedded pair. Words in *italics* are in the [glossary](glossary.md).
#
# A mask can tell an attention layer which rows a *node* may look at, because attention keeps every row. A recurrent
# layer keeps one *state* that has already mixed everything before it, so there is nothing left to mask. Notebook 2
# showed what happens when nobody notices. This one shows what to do instead.

# %%
import numpy as np
import torch
from matplotlib import pyplot as plt
from transformers import logging

import ddtree_lab as dl
from ddtree_lab.records import format_bytes
from ddtree_lab.view.chart import BLUE, GREEN, ORANGE, PINK

logging.set_verbosity_error()  # no word on kernels that a CPU does not have
logging.disable_progress_bar()  # no bar for a file of a few megabytes

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # so that a difference of 1e-6 is no rounding


def compare(what, one, other):
    difference = float((one - other).abs().max())
    print(f"{what}:", "equal" if difference < 1e-12 else f"largest difference {difference:.2g}")


# %% [markdown]
# ## One token
#
# A Gated DeltaNet head ([arXiv 2412.06464](https://arxiv.org/abs/2412.06464)) is a small associative memory: a matrix `S`
# of `d_k × d_v` numbers. Each token brings a key `k`, a value `v`, a query `q`, a decay `a` and a write strength `β`, the
# last two between 0 and 1. Then
#
# ```
# u  = β (v − (a S)ᵀ k)
# S' = a S + k uᵀ
# o  = S'ᵀ q
# ```
#
# In words: forget a little, look up what the key already recalls, and write only the *difference* to what it should.


# %%
def one_token(S, q, k, v, a, beta):
    decayed = a * S
    recalled = decayed.T @ k
    u = beta * (v - recalled)
    S = decayed + torch.outer(k, u)
    return S, S.T @ q, u


# %% [markdown]
# The difference is what the *delta* in the name stands for. Write two values under one key: a plain sum would recall
# their sum, the delta rule recalls the second.

# %%
d_k, d_v = 8, 6
key = torch.nn.functional.normalize(torch.randn(d_k), dim=0)
first, second = torch.randn(2, d_v)

S = torch.zeros(d_k, d_v)
for value in (first, second):
    S, recalled, _ = one_token(S, key, key, value, a=1.0, beta=1.0)

compare("recalled and the second value", recalled, second)
compare("recalled and the sum of both", recalled, first + second)

# %% [markdown]
# ## A chain of tokens is a loop
#
# Ten tokens, drawn at random, and the state `S_0` that the committed text has left behind. Keys and queries have
# length 1, as in the model.

# %%
N = 10
unit = lambda x: torch.nn.functional.normalize(x, dim=-1)
q, k = unit(torch.randn(N, d_k)), unit(torch.randn(N, d_k))
v = torch.randn(N, d_v)
a = torch.rand(N) * 0.5 + 0.5
beta = torch.rand(N)
S_0 = torch.randn(d_k, d_v)


def run_chain(nodes, S=S_0):
    outputs = []
    for i in nodes:
        S, o, _ = one_token(S, q[i], k[i], v[i], a[i], beta[i])
        outputs.append(o)
    return torch.stack(outputs), S


run_chain(range(N))[0].shape

# %% [markdown]
# ## Now the tokens are a tree
#
# Node 0 is the root (the *anchor*). Parents come before their children, because that is the order in which the builder
# adds nodes. In the picture a token is called by its node's number.

# %%
parents = [-1, 0, 0, 1, 2, 1, 3, 4, 6, 3]
nobody_drafted_it = np.full(N, np.nan)
tree = dl.DraftTree.from_parents(range(N), parents, log_probs=nobody_drafted_it)

dl.view(tree).picture()

# %% [markdown]
# What should node 8 answer? What it would if its path were the only text. That is the definition of right, so we
# compute it in the slowest obvious way: a loop along each path, alone.

# %%
print("path to node 8:", tree.path(8))
truth = torch.stack([run_chain(tree.path(i))[0][-1] for i in range(N)])

# %% [markdown]
# The naive port runs the nodes as they are stored, as if they were a chain.

# %%
flattened, _ = run_chain(range(N))
error = (flattened - truth).abs().amax(1)

figure, axis = plt.subplots(figsize=(6.4, 2.4))
exact = [tree.path(i) == list(range(i + 1)) for i in range(N)]
axis.bar(range(N), error, color=[GREEN if e else ORANGE for e in exact])
axis.set_xticks(range(N)), axis.set_xlabel("node"), axis.set_ylabel("error of its output")
axis.set_title("Run as one chain: right where the path is everything before it", fontsize=10)
dl.chart(figure, f"errors run as one chain; exact nodes: {np.flatnonzero(exact).tolist()}")

# %% [markdown]
# The first nodes are right because everything stored before them *is* their path. From the first sibling on, each node
# has read the keys and values of a branch it does not belong to.
#
# ## The scan: take the parent's state
#
# The repair is one word. Not the state before, the *parent's*:


# %%
def scan(parents):
    states, outputs, updates = [], [], []
    for i, parent in enumerate(parents):
        S = S_0 if parent < 0 else states[parent]
        S, o, u = one_token(S, q[i], k[i], v[i], a[i], beta[i])
        states.append(S), outputs.append(o), updates.append(u)
    return torch.stack(outputs), torch.stack(states), torch.stack(updates)


outputs, states, updates = scan(tree.parents)
compare("the scan and the paths alone", outputs, truth)

# %% [markdown]
# Exact, and it costs two things: one step after another, `N` of them, and a whole state kept for every node. On a small
# head that is nothing. On Qwen3.6-27B, whose config is bundled, it is not:

# %%
config = dl.find_preset("qwen3.6-27b").target_config()
recurrent_layers = config.layer_types.count("linear_attention")
H, K, V = (
    config.linear_num_value_heads,
    config.linear_key_head_dim,
    config.linear_value_head_dim,
)
state_bytes = recurrent_layers * H * K * V * 4  # float32

size = format_bytes(state_bytes)
print(f"{recurrent_layers} recurrent layers × {H} heads × {K} × {V}: {size} a state")
for nodes in (24, 65, 257):
    print(f"a state for each of {nodes} nodes: {format_bytes(nodes * state_bytes)}")

# %% [markdown]
# ## Unroll it: the state is a sum over ancestors
#
# Each step multiplies the state by `a` and adds `k uᵀ`. So along a path the state is the first one, decayed, and
# everything written since, decayed from where it was written:
#
# ```
# S[i] = exp(G[i]) S_0 + Σ exp(G[i] − G[j]) k[j] u[j]ᵀ      over all j above or at i
# G[i] = Σ log a[j]                                         over the same j
# ```
#
# "Above or at" is a matrix of ones and zeros, the *ancestor matrix*: the very matrix that is the attention layers' mask.

# %%
ancestors = torch.from_numpy(tree.visibility).double()  # [i, j]: 1 where j is above or at i
G = ancestors @ torch.log(a)
D = torch.exp(G[:, None] - G[None, :]) * ancestors  # decay from j to i, zero off the path

unrolled = torch.exp(G)[:, None, None] * S_0 + torch.einsum("ij,jk,jv->ikv", D, k, updates)
compare("the sum and the scan's states", unrolled, states)

# %% [markdown]
# This is already useful: given the `u`, *no* state has to be kept. `k`, `u` and `G` of the nodes are enough to make the
# state after any of them. But the `u` came from the scan. Can they be had without it?
#
# ## Put the sum into the step: a linear system
#
# A node's `u` needs the state of its parent `p`: `u[i] = β[i] (v[i] − a[i] S[p]ᵀ k[i])`. Put the sum above in place of
# `S[p]`. Since `a[i] exp(G[p]) = exp(G[i])`,
#
# ```
# u[i] + Σ A[i, j] u[j] = β[i] (v[i] − exp(G[i]) S_0ᵀ k[i])      over all j above i
#        A[i, j] = β[i] exp(G[i] − G[j]) (k[i] · k[j])
# ```
#
# All `u` on the left, all known numbers on the right. With the `u[i]` as the rows of `U`, and the right sides as those of
# `B`, it reads `(I + A) U = B`.

# %%
strict = ancestors - torch.eye(N)
A = beta[:, None] * D * strict * (k @ k.T)
B = beta[:, None] * (v - torch.exp(G)[:, None] * (k @ S_0))

compare("left side and right side, with the scan's updates", updates + A @ updates, B)

# %% [markdown]
# An ancestor has a smaller index than its descendants, so `A` lives strictly below the diagonal, and such a system is
# solved from the top down, by one library call. Here is `A` for our tree, beside the one of a chain of the same nodes:

# %%
chain_mask = torch.tril(torch.ones(N, N), -1)
figure, axes = plt.subplots(1, 2, figsize=(6.4, 3.0))
for axis, mask, name in ((axes[0], chain_mask, "a chain"), (axes[1], strict, "our tree")):
    axis.imshow(mask, cmap="Blues", vmin=0, vmax=1.4)
    axis.set_title(f"{name}: {int(mask.sum())} entries of A", fontsize=10)
    axis.set_xticks(range(N)), axis.set_yticks(range(N))
    axis.set_xlabel("writes: node j"), axis.set_ylabel("reads: node i")
figure.tight_layout()
dl.chart(figure, "where A is not zero: the triangle for a chain, ancestors only for a tree")

# %% [markdown]
# That is the whole difference between a chain and a tree: which entries are zero. Solve, and read the outputs. `D[i, j]` is
# `exp(G[i] − G[j])` for `j` above or at `i` and 0 elsewhere; `exp(G)` scales rows, `∘` multiplies entry by entry:
#
# ```
# O = exp(G) Q S_0 + (D ∘ Q Kᵀ) U
# ```

# %%
U = torch.linalg.solve_triangular(torch.eye(N) + A, B, upper=False)
O = torch.exp(G)[:, None] * (q @ S_0) + (D * (q @ k.T)) @ U

compare("updates, the solve and the scan", U, updates)
compare("outputs, the solve and the paths alone", O, truth)

# %% [markdown]
# No loop over nodes is left: a few matrix products and one solve. For chains this is known as the UT transform
# ([arXiv 2406.06484](https://arxiv.org/abs/2406.06484)), and it is how the library runs a *prompt*: in chunks, each
# of them one such solve. So nothing new is needed for a tree but the mask. Check it: with a chain for a tree we must get
# what transformers' own chunked kernel gives.

# %%
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from ddtree_lab.recurrent.gated_delta import tree_delta_rule

one_head = dict(
    queries=q[None] * d_k**-0.5,  # the layer scales its queries
    keys=k[None],
    values=v[None],
    log_decay=torch.log(a)[None],
    beta=beta[None],
)
chain = torch.ones(N, N).tril().bool()
ours, factors = tree_delta_rule(**one_head, state=S_0[None], ancestors=chain)

# The library's kernel takes [batch, token, head, width] and runs in float32.
rows = [x[None, :, None].float() for x in (q, k, v, torch.log(a), beta)]
library, _ = torch_chunk_gated_delta_rule(*rows, initial_state=S_0[None, None].float())
close = torch.allclose(ours[0].float(), library[0, :, 0], atol=1e-6)
print("a chain, ours and the library's, equal to float32 rounding:", close)

# %% [markdown]
# `tree_delta_rule` is what this package runs, for all heads at once:
# [`recurrent/gated_delta.py`](../ddtree_lab/recurrent/gated_delta.py), about twenty lines. With the tree's ancestors
# in place of the triangle:

# %%
visible = torch.from_numpy(tree.visibility)
ours, factors = tree_delta_rule(**one_head, state=S_0[None], ancestors=visible)
compare("the package and the paths alone", ours[0] / d_k**-0.5, truth)

# %% [markdown]
# ## Commit: only the accepted path
#
# A *walk* accepts a path, say to node 8. The state after it is the sum from above along that path; the other branches
# are never touched. This is what makes undoing trivial: there is nothing to undo.

# %%
path = tree.path(8)
compare("the committed state and the scan's", factors.state_after(path)[0], states[8])
kept = (factors.keys, factors.updates, factors.log_decays)
print("kept for the pass:", sum(x.numel() for x in kept), "numbers")
print("a state for each node would be:", N * d_k * d_v, "numbers")

# %% [markdown]
# ## The other recurrence: a short convolution
#
# Before the delta rule each layer smooths its inputs with a causal convolution of four taps. It has a state too, the
# last inputs, and the same question: *which* last inputs? Those of the node's own path, and above the root the committed
# window. No algebra is needed here, only the right column numbers. Columns 0 to 3 are the committed window, column
# `4 + i` is node `i`:

# %%
from ddtree_lab.recurrent.topology import TreeTopology

columns = TreeTopology(tree).conv_columns(4, torch.device("cpu"))
print("node  path               sees columns     a chain would see")
for i in range(N):
    seen, chain = columns[i].tolist(), list(range(i + 1, i + 5))
    print(f"{i:>4}  {tree.path(i)!s:<18} {seen!s:<16} {chain}")

# %% [markdown]
# Node 2 hangs below the root, so it sees node 0 (column 4) before itself, and not node 1, which was stored in between.
# The naive port sees the last column.

# %%
from ddtree_lab.recurrent.conv import tree_conv
from ddtree_lab.recurrent.naive import tree_conv_scan

inputs = torch.randn(N, 5)  # five channels
window, weight = torch.randn(5, 4), torch.randn(5, 4)
by_columns = tree_conv(inputs, window, weight, None, columns)

chain_conv = lambda x: tree_conv_scan(x, window, weight, None, range(-1, len(x) - 1))
alone = torch.stack([chain_conv(inputs[tree.path(i)])[-1] for i in range(N)])
as_chain = chain_conv(inputs)

compare("by columns and each path alone", by_columns, alone)
wrong = (as_chain - alone).abs().amax(1) > 1e-9
print("as a chain, wrong at nodes:", np.flatnonzero(wrong).tolist())

# %% [markdown]
# ## What each way costs
#
# Three exact ways for one head of a 27B layer (128 × 128, float32), counted and not timed. *Paths* gives every
# root-to-leaf path a copy of the state and runs it as a row of a batch; it needs no idea of how the layer works, which
# is why it is this package's oracle. The trees are best-first trees over a made-up drafter that gives its favourite 0.7
# at every depth, the next 0.21, and so on.

# %%
depth, vocab = 15, 12
marginals = (0.7 * 0.3 ** torch.arange(vocab)).log().expand(depth, vocab)
sizes = np.array([8, 16, 32, 64, 128, 256])
trees = [dl.build_tree(marginals, int(n) - 1) for n in sizes]

leaves = np.array([len(t.leaves()) for t in trees])
path_nodes = np.array([sum(len(t.path(leaf)) for leaf in t.leaves()) for t in trees])
deepest = np.array([t.depth + 1 for t in trees])

state = K * V
memory = {
    "scan": sizes * state,
    "paths": leaves * state,
    "solve": sizes * (K + V + 1) + 2 * sizes**2,
}
steps = {"scan": sizes, "paths": deepest, "solve": np.ones_like(sizes)}
# Multiplications: decay, recall, write and read a state are d_k d_v each.
work = {
    "scan": sizes * 4 * state,
    "paths": path_nodes * 4 * state,
    "solve": sizes * 2 * state + sizes**2 * (2 * K + 2 * V),
}

# %%
figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.2))
looks = {"scan": (ORANGE, "s"), "paths": (PINK, "^"), "solve": (BLUE, "o")}
panels = (
    ("numbers held", memory),
    ("multiplications", work),
    ("steps, one after another", steps),
)
for axis, (title, counts) in zip(axes, panels):
    for name, (colour, marker) in looks.items():
        axis.loglog(sizes, counts[name], color=colour, marker=marker, label=name)
    axis.set_xticks(sizes, sizes), axis.minorticks_off()
    axis.set_title(title, fontsize=10), axis.set_xlabel("nodes"), axis.grid(alpha=0.3)
axes[0].legend(frameon=False)
figure.tight_layout()
dl.chart(figure, "numbers held, multiplications and steps of scan, paths and solve, by nodes")

# %%
at = list(sizes).index(64)
print("for 64 nodes:")
for name in looks:
    held, products = format_bytes(4 * memory[name][at]), work[name][at] / 1e6
    print(
        f"{name:>6}: {held:>8} a head, {products:.1f}M multiplications, steps: {steps[name][at]}"
    )
print("the solve multiplies more than the scan above", state * 2 // (2 * K + 2 * V), "nodes")

# %% [markdown]
# The solve holds a small share of the numbers and has one step where the scan has one a node. Its quadratic term wins in
# the end, though most pairs of nodes are of two branches and zero. So from some 300 nodes on the package goes level by
# level (`ddtree_lab/recurrent/levels.py`): a step for each depth, and each node with its own ancestors only.
#
# Counting says nothing about a clock. The next cell times the three on *this machine*, one layer of four heads in
# float32. The numbers change from run to run; that the solve is fastest, because it has the fewest steps, should not.

# %%
from ddtree_lab.bench.timing import interleaved
from ddtree_lab.recurrent.naive import tree_scan


def layer_of(n, heads=4, width=64):
    r = lambda *shape: torch.randn(*shape, dtype=torch.float32)
    return dict(
        queries=unit(r(heads, n, width)),
        keys=unit(r(heads, n, width)),
        values=r(heads, n, width),
        log_decay=-r(heads, n).abs(),
        beta=torch.sigmoid(r(heads, n)),
        state=r(heads, width, width),
    )


def run_paths(layer, t):
    """Every path a row: heads × leaves chains side by side, shorter ones padded with their last node."""
    paths = [t.path(leaf) for leaf in t.leaves()]
    longest = t.depth + 1
    padded = torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths])
    along = {name: x[:, padded].flatten(0, 1) for name, x in layer.items() if name != "state"}
    copies = layer["state"].repeat_interleave(len(paths), 0)
    return tree_scan(**along, state=copies, parents=range(-1, longest - 1))


def cases_of(layer, t):
    """Name → what makes a call ready and returns it."""
    ancestors = torch.from_numpy(t.visibility)
    return {
        "scan": lambda: lambda: tree_scan(**layer, parents=t.parents.tolist()),
        "paths": lambda: lambda: run_paths(layer, t),
        "solve": lambda: lambda: tree_delta_rule(**layer, ancestors=ancestors),
    }


# %% tags=["varies"]
timed = {name: [] for name in looks}
for n, t in zip(sizes[:5], trees):
    found = interleaved(cases_of(layer_of(int(n)), t), repeats=5)
    for name in looks:
        timed[name].append(found.of(name).median)

figure, axis = plt.subplots(figsize=(5.2, 3.0))
for name, (colour, marker) in looks.items():
    axis.loglog(sizes[:5], np.array(timed[name]) * 1e3, color=colour, marker=marker, label=name)
axis.set_xticks(sizes[:5], sizes[:5]), axis.minorticks_off(), axis.grid(alpha=0.3)
axis.set_xlabel("nodes"), axis.set_ylabel("milliseconds"), axis.legend(frameon=False)
axis.set_title("One layer of four heads of 64 × 64, this machine", fontsize=10)
dl.chart(figure, "milliseconds of scan, paths and solve on this machine, by nodes")

# %% [markdown]
# ## The same in a model
#
# `verify_tree` puts this into every recurrent layer for the length of one pass. On the embedded pair, a hybrid of the
# same architecture as Qwen3.6-27B, with the tree that its drafter proposes:

# %%
torch.set_default_dtype(torch.float32)
pair = dl.load_pair()
# pair = dl.load_pair("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", device_map="auto")

session = dl.Session(pair, "Which three numbers follow 11, 13, 15, 17?", tree_budget=32)
session.step()
drafted = session.step()
cache = session.state.cache
oracle = dl.verify_tree(pair.target, cache, drafted, "paths")

print(f"against the paths alone, logits of standard deviation {oracle.logits.std():.1f}:")
for method in ("tree", "scan", "flattened"):
    found = dl.verify_tree(pair.target, cache, drafted, method)
    difference = float((found.logits - oracle.logits).abs().max())
    agree = int((found.argmax_token_ids == oracle.argmax_token_ids).sum())
    said = "below 0.001" if difference < 1e-3 else f"{difference:.0f}"
    print(f"{method:>10}: largest difference {said:>11}, ", end="")
    print(f"same best token at {agree} of {drafted.num_nodes} nodes")

# %% [markdown]
# ## Exercises
#
# **1.** The library keeps the solve in float32 even where the model runs in bfloat16. Round `A` and `B` to bfloat16 before
# the solve (and solve in float64). How large does the error get at the deepest nodes?
#
# <details><summary>Answer</summary>
#
# ```python
# half = lambda x: x.bfloat16().double()
# U_half = torch.linalg.solve_triangular(torch.eye(N).double() + half(A), half(B), upper=False)
# print((U_half - updates).abs().amax(1))
# ```
#
# Two or three decimal digits are left, everywhere: bfloat16 has eight bits. The error is not confined to one round either,
# because the committed state is made of these `u`, and every later token reads it.
#
# </details>
#
# **2.** When is `A = 0`, so that no solve is needed at all?
#
# <details><summary>Answer</summary>
#
# Where no node's key has anything in common with its ancestors' keys (all `k[i] · k[j] = 0`): then nothing written on
# the path is recalled, and each `u` depends on `S_0` alone. Or where the layer does not look before it writes: gated linear
# attention and Mamba-2 add `k vᵀ` whatever the key recalls, so `u[i] = β[i] v[i]` and the masked product is everything.
# Notebook 7 ports such a layer.
#
# </details>
#
# **3.** The difference `G[i] − G[j]` is masked after it is put through `exp`. Why does the package mask it *before* as
# well?
#
# <details><summary>Answer</summary>
#
# For two nodes on different branches `G[i] − G[j]` means nothing and can be large and positive. `exp` of it overflows to
# infinity in float32, and infinity times the mask's zero is NaN.
#
# </details>
#
# **Next:** [4 · Budgets and acceptance](04_budgets_and_acceptance.ipynb).
