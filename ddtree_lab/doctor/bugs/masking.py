"""Mistakes in what attention layers are told about the tree: masks and positions."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch

from ddtree_lab.doctor import port as port_module
from ddtree_lab.doctor.bugs.base import ATTENTION, Bug, BuggyPort, replaced
from ddtree_lab.doctor.bugs.verifying import chain_of, no_mask
from ddtree_lab.pair import Pair
from ddtree_lab.stages import verify as verify_module
from ddtree_lab.stages.forward import decoder_layers
from ddtree_lab.stages.mask import TreeMask
from ddtree_lab.stages.tree import DraftTree

Switch = AbstractContextManager[None]


def _mask_bug(change: Any) -> Any:
    """A switch that changes each mask as it is built: `change(mask, tree, build, port)`."""

    def switch(port: BuggyPort) -> Switch:
        def make(build: Any) -> Any:
            def built(tree: DraftTree, *args: Any, **kwargs: Any) -> TreeMask:
                return change(
                    build(tree, *args, **kwargs), tree, lambda other: build(other, *args, **kwargs), port
                )

            return built

        return replaced(port_module, "build_mask", make)

    return switch


def _each(mask: TreeMask, change: Any) -> TreeMask:
    """The mask with `change` applied to the full one and to the windowed ones."""
    windowed = {window: change(part) for window, part in mask.windowed.items()}
    return replace(mask, additive=change(mask.additive), windowed=windowed)


def _siblings_visible(mask: TreeMask, tree: DraftTree, build: Any, port: BuggyPort) -> TreeMask:
    return replace(build(chain_of(tree)), position_ids=mask.position_ids)


def _inverted(mask: TreeMask, tree: DraftTree, build: Any, port: BuggyPort) -> TreeMask:
    lowest = torch.finfo(mask.additive.dtype).min
    return _each(mask, lambda part: torch.where(part == 0, lowest, 0.0).to(part.dtype))


def _bool_added(mask: TreeMask, tree: DraftTree, build: Any, port: BuggyPort) -> TreeMask:
    return _each(mask, lambda part: (part == 0).to(part.dtype))


def _too_narrow(mask: TreeMask, tree: DraftTree, build: Any, port: BuggyPort) -> TreeMask:
    return _each(mask, lambda part: part[..., 1:])


def _newest_hidden(mask: TreeMask, tree: DraftTree, build: Any, port: BuggyPort) -> TreeMask:
    def hide(part: torch.Tensor) -> torch.Tensor:
        newest = part.shape[-1] - tree.num_nodes - 1
        hidden = part.clone()
        if newest >= 0:
            hidden[..., newest] = torch.finfo(part.dtype).min
        return hidden

    return _each(mask, hide)


def _stale(mask: TreeMask, tree: DraftTree, build: Any, port: BuggyPort) -> TreeMask:
    earlier = port.memory.get("tree")
    port.memory["tree"] = tree
    if earlier is None or earlier.num_nodes != tree.num_nodes:
        return mask
    return replace(build(earlier), position_ids=mask.position_ids)


def _positions_by_index(mask: TreeMask, tree: DraftTree, build: Any, port: BuggyPort) -> TreeMask:
    return replace(mask, position_ids=build(chain_of(tree)).position_ids)


def _positions_late(mask: TreeMask, tree: DraftTree, build: Any, port: BuggyPort) -> TreeMask:
    return replace(mask, position_ids=mask.position_ids + 1)


def mask_not_passed(port: BuggyPort) -> Switch:
    """The back end drops the mask and runs each row over all keys."""

    def make(run: Any) -> Any:
        def called(target: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            if attention_mask is None:
                return run(target, *args, **kwargs)
            with ExitStack() as stack:
                for layer in decoder_layers(target):
                    handle = layer.register_forward_pre_hook(_without_mask, with_kwargs=True, prepend=True)
                    stack.callback(handle.remove)
                return run(target, *args, attention_mask=attention_mask, **kwargs)

        return called

    return replaced(verify_module, "run_target", make)


def _without_mask(module: Any, args: Any, kwargs: Any) -> Any:
    mask = kwargs.get("attention_mask")
    return (
        (args, {**kwargs, "attention_mask": None})
        if isinstance(mask, torch.Tensor) and mask.ndim == 4
        else None
    )


def one_position_axis(port: BuggyPort) -> Switch:
    def make(run: Any) -> Any:
        def called(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            if position_ids is not None and position_ids.ndim == 2:
                text = position_ids[None]
                position_ids = torch.cat([text, text, torch.zeros_like(text), torch.zeros_like(text)])
            return run(*args, position_ids=position_ids, **kwargs)

        return called

    return replaced(verify_module, "run_target", make)


def no_mrope(pair: Pair) -> str:
    config = pair.target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    return no_mask(pair) or ("" if "mrope_section" in rope else "the target's positions have one axis only")


BUGS = (
    Bug(
        "siblings_visible", "mask",
        "the chain is right, a branching tree is not",
        "the mask among the nodes is the causal one: a node sees its siblings and their descendants",
        "let a node see the committed rows, its ancestors and itself only (build_mask)",
        _mask_bug(_siblings_visible), ATTENTION, no_mask, ("PB056", "PB047"),
    ),
    Bug(
        "mask_not_passed", "mask",
        "the chain is wrong too: nodes see what comes after them",
        "the attention back end takes no 4-D mask and drops it without a word, or the argument got lost on the way",
        "load the target with attn_implementation='sdpa', and look with a hook whether the mask arrives",
        mask_not_passed, ATTENTION, no_mask, ("PB059", "PB062"),
    ),
    Bug(
        "mask_inverted", "mask",
        "garbage from the first verified token on",
        "the mask hides what it should show: bool and additive conventions are mixed up",
        "an additive mask is 0 where a row may look and the dtype's minimum elsewhere",
        _mask_bug(_inverted), ATTENTION, no_mask, ("PB049",),
    ),
    Bug(
        "bool_mask_added", "mask",
        "small errors everywhere, no exception",
        "a bool mask reached eager attention, which adds it as 0 and 1 instead of masking",
        "pass an additive float mask; it means the same to every attention back end",
        _mask_bug(_bool_added), ATTENTION, no_mask, ("PB050",),
    ),
    Bug(
        "mask_too_narrow", "mask",
        "a shape error in the verify pass, at some lengths only",
        "the mask's width is not the number of committed rows plus nodes",
        "width = past_length + num_nodes for full layers; sliding layers keep window − 1 committed rows",
        _mask_bug(_too_narrow), ATTENTION, no_mask, ("PB052", "PB053"),
    ),
    Bug(
        "newest_row_hidden", "mask",
        "plausible text that is not the target's, acceptance somewhat low",
        "the mask hides the last committed row: its length was taken before the anchor's predecessor was appended",
        "take past_length from the cache itself when the mask is built",
        _mask_bug(_newest_hidden), ATTENTION, no_mask, ("PB077",),
    ),
    Bug(
        "stale_tree_block", "mask",
        "the first round is right, later ones are not",
        "the mask still holds the block of an earlier tree: a buffer is reused without being rewritten",
        "write the whole block each round, also what is to be hidden",
        _mask_bug(_stale), ATTENTION, no_mask, ("PB145", "PB140"),
    ),
    Bug(
        "positions_by_index", "mask",
        "the chain is right, a branching tree is not, worse the wider it is",
        "position ids count nodes in storage order; one sibling shifts every later node",
        "the position of a node is past_length + its depth",
        _mask_bug(_positions_by_index), ATTENTION, no_mask, ("PB064", "PB065"),
    ),
    Bug(
        "positions_off_by_one", "mask",
        "plausible text, every node slightly wrong",
        "position ids start one too late: the anchor's position is past_length, not past_length + 1",
        "the root sits at past_length; the token after it at past_length + 1",
        _mask_bug(_positions_late), ATTENTION, no_mask, ("PB077", "PB068"),
    ),
    Bug(
        "mrope_axes_empty", "mask",
        "text-only prompts go wrong on a multimodal model, the longer the worse",
        "multimodal positions have several axes and only the first was filled",
        "for text all axes are equal: pass position_ids of shape [1, n] or repeat them over the axes",
        one_position_axis, ATTENTION, no_mrope, ("PB071", "PB067"),
    ),
)  # fmt: skip
