"""Mistakes that leave the text right and the acceptance low: taps, context, block, the drafter as built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ddtree_lab.doctor import port as port_module
from ddtree_lab.doctor.bugs.base import Bug, BuggyPort, dflash, replaced
from ddtree_lab.drafter import DFlashDrafter, DrafterContext
from ddtree_lab.drafter_layers import DFlashAttention
from ddtree_lab.pair import Pair
from ddtree_lab.stages.forward import decoder_layers, run_target

Switch = AbstractContextManager[None]
HALF_PRECISION_LIMIT = torch.finfo(torch.float16).max


def no_dflash(pair: Pair) -> str:
    return (
        "" if isinstance(pair.drafter, DFlashDrafter) else "the drafter reads no hidden states of the target"
    )


def no_window(pair: Pair) -> str:
    if no_dflash(pair):
        return no_dflash(pair)
    sliding = "sliding_attention" in dflash(pair).config.layer_types
    return "" if sliding else "the drafter has no sliding layers"


def no_untied_head(pair: Pair) -> str:
    tied = pair.embeddings.tied
    return no_dflash(pair) or ("the target's head is its embedding, there is no other one" if tied else "")


def no_scale(pair: Pair) -> str:
    embedding = pair.embeddings.input
    if no_dflash(pair) or embedding.weight.is_meta:
        return no_dflash(pair) or "the target's embedding is offloaded"
    some = torch.arange(4, device=pair.embeddings.device)  # one of them may be padding, a row of zeros
    scaled = not torch.equal(embedding(some), embedding.weight[:4])
    return "" if scaled else "the target's embedding gives its rows as they are"


def no_overflow(pair: Pair) -> str:
    """The fusion of the bundled pair is small; only weights of a real size overflow half precision."""
    if no_dflash(pair):
        return no_dflash(pair)
    fused = _largest_fusion(pair)
    if fused > HALF_PRECISION_LIMIT:
        return ""
    return (
        f"the drafter's tap fusion stays at {fused:.3g}, below half precision's {HALF_PRECISION_LIMIT:,.0f}"
    )


@torch.no_grad()
def _largest_fusion(pair: Pair) -> float:
    ids = torch.arange(16)[None] % pair.embeddings.vocab_size
    taps = run_target(pair.target, ids, None, pair.drafter.tap_layer_ids).taps
    assert taps is not None
    return float(dflash(pair).fc(taps.to(dflash(pair).dtype)).abs().max())


def _taps_moved(offset: int) -> Callable[[BuggyPort], Switch]:
    def switch(port: BuggyPort) -> Switch:
        last = len(decoder_layers(port.pair.target)) - 1
        return replaced(port, "tap_layer_ids", lambda ids: tuple(min(max(i + offset, 0), last) for i in ids))

    return switch


def rejected_taps(port: BuggyPort) -> Switch:
    return replaced(port, "_context_rows", lambda _: lambda tree, path: list(range(len(path))))


def all_taps(port: BuggyPort) -> Switch:
    return replaced(port, "_context_rows", lambda _: lambda tree, path: list(range(tree.num_nodes)))


def prompt_missing(port: BuggyPort) -> Switch:
    def make(extend: Any) -> Any:
        def extended(drafter: Any, taps: Any, context: Any, tokens: Any) -> Any:
            if context is not None:
                return extend(drafter, taps, context, tokens)
            return _rows(extend(drafter, taps, None, tokens), slice(-1, None))

        return extended

    return replaced(port_module, "extend_context", make)


def _rows(context: DrafterContext, kept: slice) -> DrafterContext:
    return DrafterContext(
        context.keys[..., kept, :], context.values[..., kept, :], context.position_ids[:, kept]
    )


@contextmanager
def noise_kept(port: BuggyPort) -> Iterator[None]:
    """The keys and values of a drafted block are still in the context when the next rows come."""

    def make_draft(draft: Any) -> Any:
        def drafted(*args: Any) -> Any:
            recorded: list[tuple[Tensor, Tensor]] = []
            with replaced(DFlashAttention, "heads", lambda f: _recording(f, recorded)):
                drafted_block = draft(*args)
            port.memory["noise"] = recorded
            return drafted_block

        return drafted

    def make_extend(extend: Any) -> Any:
        def extended(drafter: Any, taps: Any, context: Any, tokens: Any) -> Any:
            noise = port.memory.pop("noise", None)
            if context is not None and noise:
                context = _with_noise(context, noise)
            return extend(drafter, taps, context, tokens)

        return extended

    with (
        replaced(port_module, "draft_block", make_draft),
        replaced(port_module, "extend_context", make_extend),
    ):
        yield


def _with_noise(context: DrafterContext, noise: list[tuple[Tensor, Tensor]]) -> DrafterContext:
    keys, values = (torch.stack(layers) for layers in zip(*noise, strict=True))  # (L, B, heads, rows, d)
    start = context.num_rows
    positions = torch.arange(start, start + keys.shape[3], device=context.position_ids.device)[None]
    return DrafterContext(
        torch.cat([context.keys, keys], dim=3),
        torch.cat([context.values, values], dim=3),
        torch.cat([context.position_ids, positions], dim=1),
    )


def _recording(heads: Any, recorded: list[tuple[Tensor, Tensor]]) -> Any:
    def called(self: Any, x: Tensor, rope: Any) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = heads(self, x, rope)
        recorded.append((keys, values))
        return queries, keys, values

    return called


def _block_changed(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Callable[[BuggyPort], Switch]:
    """A switch that changes what goes into a block: `change(embeddings, position_ids)`."""

    def switch(port: BuggyPort) -> Switch:
        def make(denoise: Any) -> Any:
            def denoised(self: Any, rows: Tensor, positions: Tensor, *args: Any, rope: Any = None) -> Tensor:
                return denoise(
                    self, *change(rows, positions), *args
                )  # with the rope of the changed positions

            return denoised

        return replaced(DFlashDrafter, "denoise", make)

    return switch


def _config_changed(**changes: Any) -> Callable[[BuggyPort], Switch]:
    def switch(port: BuggyPort) -> Switch:
        return replaced(dflash(port.pair), "config", lambda config: replace(config, **changes))

    return switch


def wrong_mask_id(port: BuggyPort) -> Switch:
    rows = port.pair.embeddings.vocab_size
    return replaced(
        dflash(port.pair),
        "config",
        lambda config: replace(config, mask_token_id=(config.mask_token_id + 1) % rows),
    )


def wrong_theta(port: BuggyPort) -> Switch:
    config = dflash(port.pair).config
    other = replace(config, rope_theta=1e4 if config.rope_theta != 1e4 else 1e6)
    return replaced(dflash(port.pair), "rotary_emb", lambda _: Qwen3RotaryEmbedding(other.to_qwen3()))


def partial_rotary(port: BuggyPort) -> Switch:
    """Only the first quarter of the frequencies turns, as in a target with a partial_rotary_factor of 0.25."""

    def make(rotary: Any) -> Any:
        partial = Qwen3RotaryEmbedding(dflash(port.pair).config.to_qwen3())
        partial.inv_freq = rotary.inv_freq.clone()
        partial.inv_freq[len(partial.inv_freq) // 4 :] = 0
        return partial

    return replaced(dflash(port.pair), "rotary_emb", make)


def half_precision_fusion(port: BuggyPort) -> Switch:
    def make(forward: Any) -> Any:
        return lambda x: forward(x).to(torch.float16).to(x.dtype)

    return replaced(dflash(port.pair).fc, "forward", make)


def embedding_as_head(port: BuggyPort) -> Switch:
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(port.pair.embeddings.input.weight, requires_grad=False)
    return replaced(port.pair, "embeddings", lambda embeddings: replace(embeddings, output=head))


def scale_missing(port: BuggyPort) -> Switch:
    """Rows are taken from the embedding's weight; the module itself would scale them."""
    bare = nn.Embedding(1, 1)
    bare.weight = port.pair.embeddings.input.weight
    return replaced(port.pair, "embeddings", lambda embeddings: replace(embeddings, input=bare))


def norm_skipped(port: BuggyPort) -> Switch:
    return replaced(dflash(port.pair).norm, "forward", lambda _: lambda x: x)


def context_leaks(port: BuggyPort) -> Switch:
    """The first run's context stays, and every later run is appended to it."""

    def make(extend: Any) -> Any:
        def extended(drafter: Any, taps: Any, context: Any, tokens: Any) -> Any:
            if context is not None:
                return extend(drafter, taps, context, tokens)
            leaked = port.memory.get("context")
            port.memory.setdefault("context", extend(drafter, taps, None, tokens))
            return extend(drafter, taps, leaked, tokens)

        return extended

    return replaced(port_module, "extend_context", make)


def _bug(
    name: str, symptom: str, cause: str, fix: str, switch: Any, *references: str, hindrance: Any = no_dflash
) -> Bug:
    return Bug(name, "draft", symptom, cause, fix, switch, "", hindrance, references)


LOW = "the text is right and acceptance is low"
BUGS = (
    _bug(
        "tap_off_by_minus_one", LOW,
        "every tap is read one layer too early: hidden_states[i] was taken for layer i",
        "tap i is what decoder layer i returns, hidden_states[i + 1]",
        _taps_moved(-1), "PB079", "PB080",
    ),
    _bug(
        "tap_off_by_plus_one", LOW,
        "every tap is read one layer too late",
        "tap i is what decoder layer i returns, hidden_states[i + 1]",
        _taps_moved(1), "PB083", "PB094",
    ),
    _bug(
        "rejected_taps_kept", "acceptance falls from round to round while the text stays right",
        "the drafter's context is given the first rows of the verify pass, rejected nodes among them",
        "give it the taps of the accepted path, in the order of the text",
        rejected_taps, "PB095",
    ),
    _bug(
        "all_taps_kept", "acceptance falls from round to round while the text stays right",
        "every verified row's taps stay in the drafter's context, accepted or not",
        "give it the taps of the accepted path only; context rows = committed tokens",
        all_taps, "PB095",
    ),
    _bug(
        "prompt_context_missing", "acceptance is low at first and recovers as text is written",
        "the drafter was not given the taps of the prompt",
        "extend its context with the prefill's taps, all rows",
        prompt_missing, "PB086", "PB146",
    ),
    _bug(
        "noise_rows_kept", "the first round drafts well, later ones do not",
        "the keys and values of a drafted block stay in the drafter's cache",
        "crop the drafter's cache to the context after each draft",
        noise_kept, "PB143",
    ),
    _bug(
        "anchor_is_mask", LOW,
        "the block starts with the mask token instead of the last committed token",
        "block = [anchor, mask × (block_size − 1)]",
        _block_changed(lambda rows, positions: (torch.cat([rows[:, 1:2], rows[:, 1:]], dim=1), positions)),
        "PB172",
    ),
    _bug(
        "wrong_mask_id", LOW,
        "the block is filled with another token than the drafter's mask token",
        "read mask_token_id from dflash_config in the drafter's config.json",
        wrong_mask_id, "PB088", "PB091", "PB092",
    ),
    _bug(
        "draft_positions_off_by_one", LOW,
        "the block's positions start one too late",
        "the anchor's position is the number of context rows",
        _block_changed(lambda rows, positions: (rows, positions + 1)), "PB077",
    ),
    _bug(
        "embedding_scaled", LOW,
        "the block's embeddings are scaled by √hidden, which the drafter was not trained with",
        "take the rows of the target's input embedding as they are",
        _block_changed(lambda rows, positions: (rows * rows.shape[-1] ** 0.5, positions)), "PB088",
    ),
    _bug(
        "embedding_scale_missing", LOW,
        "the block's rows are the embedding's weight, which this target's embedding scales",
        "call the module that get_input_embeddings() returns instead of indexing its weight",
        scale_missing, "PB088", hindrance=no_scale,
    ),
    _bug(
        "embedding_as_head", "drafts are garbage, the text is right",
        "the drafter's hidden states are read with the input embedding, but this target's head is another matrix",
        "use get_output_embeddings()",
        embedding_as_head, "PB098", "PB097", hindrance=no_untied_head,
    ),
    _bug(
        "final_norm_skipped", LOW,
        "the head reads the drafter's hidden states without its final norm",
        "apply the drafter's own norm, then the target's head",
        norm_skipped, "PB083",
    ),
    _bug(
        "rope_theta_wrong", "acceptance is low, the lower the longer the text",
        "the drafter was built with another rope_theta than its config says",
        "read rope_theta from the top of the config or from rope_parameters, never from the target's",
        wrong_theta, "PB073", "PB089",
    ),
    _bug(
        "partial_rotary_leaked", LOW,
        "the target's partial_rotary_factor was used for the drafter, whose heads turn in full",
        "build the drafter's rotary embedding from the drafter's own config",
        partial_rotary, "PB073", "PB074",
    ),
    _bug(
        "window_ignored", "acceptance falls once the text is longer than the drafter's window",
        "sliding layers of the drafter see the whole context",
        "honour sliding_window and layer_types under every attention back end",
        _config_changed(sliding_window=1 << 30), "PB112", "PB113", hindrance=no_window,
    ),
    _bug(
        "window_not_causal", LOW,
        "sliding layers of the drafter are bidirectional inside the block",
        "without an is_causal key sliding layers are causal inside the block",
        _config_changed(is_causal=False), "PB089", hindrance=no_window,
    ),
    _bug(
        "half_precision_fusion", "almost nothing is accepted (0.06 of 15 in a public report), the text is right",
        "the tap fusion overflows in float16",
        "keep the drafter in bfloat16 or float32",
        half_precision_fusion, "PB118", "PB134", hindrance=no_overflow,
    ),
    _bug(
        "context_leaks_between_runs", "the first prompt drafts well, every later one badly",
        "the drafter's context of an earlier run is still there when the next one starts",
        "start each run with an empty context",
        context_leaks, "PB143", "PB146",
    ),
)  # fmt: skip
