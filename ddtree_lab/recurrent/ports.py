"""Ports: which module classes of the library have a tree-structured forward, and how they differ.

A port computes what the module's own forward would, for every node of a tree, from the committed
state and without writing it. It returns factors from which the state after any path follows.

A new architecture needs a subclass that shows its difference and one `register_port` line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ddtree_lab.compat import get_state
from ddtree_lab.recurrent.conv import tree_conv
from ddtree_lab.recurrent.factors import Factors, GatedDeltaFactors
from ddtree_lab.recurrent.gated_delta import tree_delta_rule
from ddtree_lab.recurrent.levels import level_delta_rule
from ddtree_lab.recurrent.naive import tree_conv_scan, tree_scan
from ddtree_lab.recurrent.topology import TreeTopology

_MISSING = object()


@runtime_checkable
class RecurrentPort(Protocol):
    """A tree-structured twin of one module class."""

    def forward(
        self,
        module: nn.Module,
        hidden_states: Float[Tensor, "1 node hidden"],
        layer: Any,
        topology: TreeTopology,
        scan: bool,
    ) -> tuple[Float[Tensor, "1 node hidden"], Factors]:
        """What the module answers for each node, and the factors of its states.

        Args:
            module: the module of the model, for its weights.
            layer: its cache layer with the committed state; read, not written.
            scan: use the naive recurrences.
        """


class GatedDeltaPort:
    """Gated DeltaNet as in Qwen3.5 and Qwen3.6, dense and mixture-of-experts."""

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution (N, C), gate (N, H·d_v), and β and a before their activations (N, H)."""
        return module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)

    def forward(
        self, module: Any, hidden_states: Tensor, layer: Any, topology: TreeTopology, scan: bool
    ) -> tuple[Tensor, GatedDeltaFactors]:
        conv_inputs, z, b, a = self.project(module, hidden_states[0])
        mixed = self._convolve(module, conv_inputs, layer, topology, scan)
        # The state is kept in at least float32, whatever the model runs in; so is the solve.
        precise = torch.promote_types(mixed.dtype, torch.float32)
        key_heads, value_heads = mixed.to(precise).split([2 * module.key_dim, module.value_dim], -1)
        both = key_heads.unflatten(-1, (2, -1, module.head_k_dim)).permute(
            1, 2, 0, 3
        )  # (2, key heads, N, d_k)
        query_norm, key_norm = _inverse_norm(both)
        query, key = both[0] * (query_norm * module.head_k_dim**-0.5), both[1] * key_norm
        value = value_heads.unflatten(-1, (-1, module.head_v_dim)).transpose(0, 1)  # (heads, N, d_v)
        log_decay = -module.A_log.to(precise).exp() * F.softplus(a.to(precise) + module.dt_bias.to(precise))
        beta = b.sigmoid().to(precise)
        state = get_state(layer, "recurrent_states")[0]
        args = (query, key, value, log_decay.T, beta.T, state)
        if scan:
            out, delta = tree_scan(*args, topology.parents)
        elif topology.is_sparse and state.device.type == "cpu":  # measured there; elsewhere calls cost more
            out, delta = level_delta_rule(*args, topology.levels(state.device))
        else:
            out, delta = tree_delta_rule(*args, topology.ancestors(state.device))
        out = out.transpose(0, 1).to(hidden_states.dtype)  # (N, H, d_v)
        gated = module.norm(out.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
        return module.out_proj(gated.reshape(1, len(out), -1)), GatedDeltaFactors(delta, conv_inputs)

    def _convolve(
        self, module: Any, inputs: Tensor, layer: Any, topology: TreeTopology, scan: bool
    ) -> Tensor:
        weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias  # (C, K)
        window = get_state(layer, "conv_states")[0].to(inputs.dtype)  # (C, K)
        if scan:
            mixed = tree_conv_scan(inputs, window, weight, bias, topology.parents)
        else:
            columns = topology.conv_columns(window.shape[1], inputs.device)
            mixed = tree_conv(inputs, window, weight, bias, columns)
        return ACT2FN[module.activation](mixed)


class Qwen3NextPort(GatedDeltaPort):
    """Qwen3-Next: the same layer with two fused, head-interleaved projections."""

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        fused = module.in_proj_qkvz(x[None]), module.in_proj_ba(x[None])
        query, key, value, z, b, a = module.fix_query_key_value_ordering(*fused)
        conv_inputs = torch.cat([part.reshape(len(x), -1) for part in (query, key, value)], dim=-1)
        return conv_inputs, z.reshape(len(x), -1), b[0], a[0]


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)  # ε inside, as in the library's kernels


_PORTS: dict[str, RecurrentPort] = {}


def register_port(module_class: type | str, port: RecurrentPort) -> None:
    """Use `port` for modules of `module_class`, a class or its dotted name (which imports nothing)."""
    _PORTS[module_class if isinstance(module_class, str) else _dotted_name(module_class)] = port


def registered_ports() -> tuple[tuple[str, RecurrentPort], ...]:
    """Dotted names of the module classes that have a port, and the ports."""
    return tuple(_PORTS.items())


def find_port(module: nn.Module) -> RecurrentPort | None:
    """The port of a module's class or of the nearest base class that has one."""
    return next((_PORTS[name] for name in map(_dotted_name, type(module).__mro__) if name in _PORTS), None)


def find_recurrent_modules(target: PreTrainedModel) -> dict[int, nn.Module]:
    """Layer index → the module of that layer for which a port is registered."""
    return {
        int(m.layer_idx): m for m in target.modules() if hasattr(m, "layer_idx") and find_port(m) is not None
    }


@contextmanager
def replaced_forwards(replacements: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules another forward for the length of a block, whatever happens in it.

    Where accelerate has wrapped a module (offloading), the forward inside its wrapper is replaced, so
    that its hooks still bring the weights.
    """
    saved: list[tuple[nn.Module, str, Any]] = []
    try:
        for module, forward in replacements.items():
            name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
            saved.append((module, name, vars(module).get(name, _MISSING)))
            setattr(module, name, forward)
        yield
    finally:
        for module, name, before in reversed(saved):
            if before is _MISSING:
                delattr(module, name)
            else:
                setattr(module, name, before)


def _dotted_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


for _family, _prefix in (("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")):
    register_port(
        f"transformers.models.{_family}.modeling_{_family}.{_prefix}GatedDeltaNet", GatedDeltaPort()
    )
register_port("transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet", Qwen3NextPort())
