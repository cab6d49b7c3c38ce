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

    def state_after(self, path: Sequence[int]) -> Float[Tensor, "head key_dim value_dim"]:
        """The state after the last node of a root path: S_a = e^{G_a} S_0 + Σ_j D_aj k_j u_jᵀ.

        Only the accepted path is summed: committing does not touch the rest of the tree.
        """
        nodes = torch.as_tensor(path, device=self.keys.device)
        log_decay = self.log_decays[:, nodes]  # (H, P)
        weight = torch.exp(log_decay[:, -1:] - log_decay)[..., None]  # (H, P, 1)
        keys = _per_head(self.keys[:, nodes], self.updates)
        written = (keys * weight).mT @ self.updates[:, nodes]
        return torch.exp(log_decay[:, -1])[:, None, None] * self.initial_state.to(written.dtype) + written


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
    # Each sum runs along one path only, so G stays exact in trees of any width.
    G = log_decay @ ancestors.to(log_decay.dtype).mT  # (H, N)
    # Masked before exp: between two branches the difference can be large and positive.
    D = (G[..., :, None] - G[..., None, :]).masked_fill_(~ancestors, -torch.inf).exp_()  # (H, N, N)
    A = (beta[..., None] * D * _per_head(keys @ keys.mT, values)).tril_(-1)
    grown, S_0 = torch.exp(G)[..., None], state.to(values.dtype)  # (H, N, 1), (H, d_k, d_v)
    target = beta[..., None] * (values - grown * (_per_head(keys, values) @ S_0))
    U = torch.linalg.solve_triangular(A, target, upper=False, unitriangular=True)  # (H, N, d_v)
    outputs = grown * (_per_head(queries, values) @ S_0) + (D * _per_head(queries @ keys.mT, values)) @ U
    return outputs, DeltaFactors(keys, U, G, state)


def _per_head(x: Tensor, values: Tensor) -> Tensor:
    """Rows of key heads repeated for the value heads they serve."""
    return x.repeat_interleave(len(values) // len(x), 0)
