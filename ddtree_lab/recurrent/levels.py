r"""The gated delta rule over a large tree, level by level.

`gated_delta` writes all pairs of nodes down, n² for each head, though most are of two branches and zero. A draft tree
is shallow, so a node has few ancestors and the pairs that count are few: n times the mean depth. Here the nodes of
one depth are taken at once, each with the nodes of its own path and nothing else:

    u_i = β_i (v_i − e^{G_i} S_0ᵀ k_i − Σ_j D_ij (k_i·k_j) u_j)      over the ancestors j of i
    o_i = e^{G_i} S_0ᵀ q_i + Σ_j D_ij (q_i·k_j) u_j                  over them and i itself

in the terms of `gated_delta`. The sums of a level need the u of the levels above, so a level is a step; there are as
many as the tree is deep. With a thousand nodes that is several times as fast as one solve on a processor, with a
hundred it is slower: each step is a dozen calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddtree_lab.recurrent.gated_delta import DeltaFactors, per_head


def level_delta_rule(
    queries: Float[Tensor, "key_head node key_dim"],
    keys: Float[Tensor, "key_head node key_dim"],
    values: Float[Tensor, "head node value_dim"],
    log_decay: Float[Tensor, "head node"],
    beta: Float[Tensor, "head node"],
    state: Float[Tensor, "head key_dim value_dim"],
    levels: Sequence[Int[Tensor, "_ _"]],
) -> tuple[Float[Tensor, "head node value_dim"], DeltaFactors]:
    """As `tree_delta_rule`.

    Args:
        levels: for each depth d, from the root's on, the paths of its nodes, root first, [level nodes, d + 1]
            (`TreeTopology.levels`).
    """
    groups, S_0 = len(values) // len(keys), state.to(values.dtype)
    recalled, outputs = per_head(keys, groups) @ S_0, per_head(queries, groups) @ S_0  # (H, N, d_v)
    G, U = torch.empty_like(log_decay), torch.empty_like(values)
    for paths in levels:
        nodes = paths[:, -1]  # (n,); a path has d nodes
        G.index_copy_(1, nodes, _along(log_decay, paths).sum(-1))
        G_path = _along(G, paths)  # (H, n, d)
        D, grown = torch.exp(G_path[..., -1:] - G_path), torch.exp(G_path[..., -1:])
        both = torch.stack([keys.index_select(1, nodes), queries.index_select(1, nodes)], dim=2)
        products = both @ _along(keys, paths).mT  # (key heads, n, 2, d): made once for the heads it serves
        weights = (D[..., None, :].unflatten(0, (-1, groups)) * products[:, None]).flatten(0, 1)
        seen = weights[..., :-1] @ _along(U, paths[:, :-1])  # (H, n, 2, d_v): by the key, by the query
        target = values.index_select(1, nodes) - grown * recalled.index_select(1, nodes) - seen[:, :, 0]
        update = beta.index_select(1, nodes)[..., None] * target
        out = grown * outputs.index_select(1, nodes) + seen[:, :, 1] + weights[:, :, 1, -1:] * update
        U.index_copy_(1, nodes, update)
        outputs.index_copy_(1, nodes, out)
    return outputs, DeltaFactors(keys, U, G, state)


def _along(x: Tensor, paths: Tensor) -> Tensor:
    """Rows of `x` (heads, N, …) along paths (n, d) → (heads, n, d, …)."""
    return x.index_select(1, paths.flatten()).unflatten(1, paths.shape)
