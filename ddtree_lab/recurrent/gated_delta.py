r"""The gated delta rule over a tree, in one triangular solve.

One token of a Gated DeltaNet layer (arXiv 2412.06464) decays the state, then writes what the key
does not already recall. For node i with parent p(i), S being d_k × d_v:

    u_i = β_i (v_i − a_i S_pᵀ k_i)        S_i = a_i S_p + k_i u_iᵀ        o_i = S_iᵀ q_i

Unrolled along a path the state is a sum over ancestors, S_i = e^{G_i} S_0 + Σ_j D_ij k_j u_jᵀ, with

    G_i  = Σ log a over the path from the root to i
    D_ij = e^{G_i − G_j} where j is i or an ancestor of i, else 0

Put into u_i this leaves a linear system over the nodes, A being β_i D_ij (k_i·k_j) for strict ancestors:

    (I + A) U = diag(β) (V − diag(e^G) K S_0)        O = diag(e^G) Q S_0 + (D ∘ Q Kᵀ) U

Nodes are in topological order, so A is strictly lower triangular. For a chain D is the usual
causal decay matrix and this is the chunked form of the library's own kernel (the UT transform,
arXiv 2406.06484): the tree changes nothing but the mask. The readable twin is `naive.tree_scan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DeltaFactors:
    """What a pass leaves behind instead of a state per node.

    N (d_k + d_v + 1) numbers a head where snapshots would take N d_k d_v, and less where value heads share a key
    head; the state after any node follows from the factors along its path.
    """

    keys: Float[Tensor, "key_head node key_dim"]
    updates: Float[Tensor, "head node value_dim"]
    log_decays: Float[Tensor, "head node"]
    initial_state: Float[Tensor, "head key_dim value_dim"]

    def state_after(self, path: Sequence[int] | Tensor) -> Float[Tensor, "head key_dim value_dim"]:
        """The state after the last node of a root path: S_a = e^{G_a} S_0 + Σ_j D_aj k_j u_jᵀ.

        Only the accepted path is summed: committing does not touch the rest of the tree.
        """
        nodes = torch.as_tensor(path, device=self.keys.device)
        log_decay = self.log_decays.index_select(1, nodes)[..., None]  # (H, P, 1)
        last = log_decay[:, -1:]
        updates = self.updates.index_select(1, nodes).mul_(torch.exp(last - log_decay))
        keys = per_head(self.keys.index_select(1, nodes), len(self.updates) // len(self.keys))
        return torch.baddbmm(torch.exp(last) * self.initial_state.to(updates.dtype), keys.mT, updates)

    @classmethod
    def joined(cls, layers: Sequence[DeltaFactors]) -> DeltaFactors:
        """Layers of one shape as a single one with all of their heads, since no head looks at another."""
        if len(layers) == 1:
            return layers[0]
        return cls(
            torch.cat([layer.keys for layer in layers]),
            torch.cat([layer.updates for layer in layers]),
            torch.cat([layer.log_decays for layer in layers]),
            torch.cat([layer.initial_state for layer in layers]),
        )


def tree_delta_rule(
    queries: Float[Tensor, "key_head node key_dim"],
    keys: Float[Tensor, "key_head node key_dim"],
    values: Float[Tensor, "head node value_dim"],
    log_decay: Float[Tensor, "head node"],
    beta: Float[Tensor, "head node"],
    state: Float[Tensor, "head key_dim value_dim"],
    ancestors: Bool[Tensor, "node node"],
) -> tuple[Float[Tensor, "head node value_dim"], DeltaFactors]:
    """Outputs of every node and the factors its states are made of.

    Args:
        queries: l2-normalised and scaled by d_k^-½; keys l2-normalised. A key head serves as many consecutive
            value heads as there are for each.
        log_decay: log a, ≤ 0.
        state: S_0, the committed state below which the tree hangs, in its own dtype; not written.
        ancestors: `[i, j]` True where j is i or an ancestor of i; parents come first.
    """
    groups, num_nodes = len(values) // len(keys), keys.shape[1]
    visible = ancestors.to(log_decay.dtype)  # (N, N), 1 or 0
    # Each sum runs along one path only, so G stays exact in trees of any width.
    G = log_decay @ visible.mT  # (H, N)
    # Masked before exp, where the difference between two branches can be large and positive, and after it. Zeros
    # and not -inf, for which exp is five times slower.
    D = (G[..., :, None] - G[..., None, :]).mul_(visible).exp_().mul_(visible)  # (H, N, N)
    D_by_key = D.unflatten(0, (-1, groups))  # products of a key head are made once for the heads it serves
    # K and Q meet the same two matrices, Kᵀ and S_0: half of the products if they stand below one another.
    rows = torch.cat([keys, queries], dim=1)  # (key heads, 2N, d_k)
    KK, QK = (rows @ keys.mT)[:, None].split(num_nodes, dim=2)
    from_state = (per_head(rows, groups) @ state.to(values.dtype)).unflatten(1, (2, -1))  # (H, 2, N, d_v)
    KS, QS = from_state.mul_(torch.exp(G)[:, None, :, None]).unbind(1)
    A = (D_by_key * KK).flatten(0, 1).mul_(beta[..., None])
    target = (values - KS).mul_(beta[..., None])
    # As Uᵀ (I + A)ᵀ = targetᵀ, for which the solver copies nothing. It reads nothing but the strict triangle.
    U = torch.linalg.solve_triangular(A.mT, target.mT, upper=True, left=False, unitriangular=True).mT
    weights = D_by_key.mul_(QK).flatten(0, 1)  # D ∘ Q Kᵀ, in the place of D
    outputs = torch.baddbmm(QS, weights, U)
    return outputs, DeltaFactors(keys, U, G, state)


def per_head(x: Tensor, groups: int) -> Tensor:
    """Rows of key heads repeated for the value heads they serve."""
    return x if groups == 1 else x[:, None].expand(-1, groups, -1, -1).flatten(0, 1)
