"""A memory plan in the terminal: what fits, what goes where, what a verify pass needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddtree_lab.records import format_bytes, ranges

if TYPE_CHECKING:
    from ddtree_lab.weightless.plan import MemoryPlan, Placement


def draw_plan(plan: MemoryPlan) -> Group:
    drafter = f"  with {plan.drafter}" if plan.drafter else "  without a drafter"
    settings = f"{plan.dtype}, {plan.context} tokens of context, tree budget {plan.tree_budget}"
    parts: list[RenderableType] = [Text.assemble((plan.name, "bold"), drafter), settings]
    parts += ["", _quantizations(plan)]
    if any(placement.quantization and placement.converted < 0.5 for placement in plan.placements):
        parts.append("bitsandbytes converts linear layers; experts kept as one tensor stay as they are")
    if plan.best is not None:
        parts += ["", _devices(plan.best)]
    parts += ["", _stages(plan), ""]
    parts.append(_verdict(plan) if plan.best is None else _command(plan, plan.best))
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def _quantizations(plan: MemoryPlan) -> Table:
    table = _table("quantization", "converted", "weights", "with the rest", "there is", "fits")
    available = sum(plan.memory)
    for placement in plan.placements:
        mark = Text("✓", "bold green") if placement.fits else Text("✗", "bold red")
        table.add_row(
            placement.name,
            f"{placement.converted:.0%}" if placement.quantization else "–",
            format_bytes(placement.weights),
            format_bytes(placement.needed),
            format_bytes(available),
            mark,
        )
    return table


def _devices(placement: Placement) -> Table:
    table = _table("device", "layers", "weights", "caches", "drafter", "working", "reserve", "free", "of")
    for device in placement.devices:
        sizes = (device.weights, device.caches, device.drafter, device.working, device.reserve)
        table.add_row(
            str(device.device),
            ranges(device.layers, most=3) or "–",
            *(format_bytes(size) if size else "–" for size in (*sizes, device.free, device.memory)),
        )
    return table


def _stages(plan: MemoryPlan) -> Table:
    needs, verify = plan.needs, plan.needs.verify
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    nodes = f"{verify.num_nodes} nodes"
    rows = [
        ("prefill", needs.prefill, "all of the context in one pass; less with fused kernels"),
        ("verify", verify.total, f"{nodes}, method {verify.method}"),
        ("  logits", verify.logits, "of every node"),
        ("  taps", verify.taps, "hidden states for the drafter"),
        ("  mask", verify.mask, "nodes × (context + nodes)"),
        ("  cache copy", verify.cache_copy, _copy_note(verify.method)),
        ("  factors", verify.factors, f"instead of {format_bytes(verify.snapshots)} of states for each node"),
        ("  working", verify.working, "of the layer being run"),
        ("draft", needs.draft, "a block's distributions, or the prompt's taps"),
    ]
    for name, size, note in rows:
        if size:
            table.add_row(name, format_bytes(size), note)
    return table


def _copy_note(method: str) -> str:
    return "keys and values, longer by the nodes" if method == "tree" else "a cache for each path in a pass"


def _command(plan: MemoryPlan, placement: Placement) -> Text:
    options = [f'"{plan.target}"', *([f'"{plan.drafter}"'] if plan.drafter else [])]
    if len(placement.devices) > 1:
        memory = ", ".join(f'{device}: "{size // 2**20}MiB"' for device, size in placement.max_memory.items())
        if placement.strategy != "auto":
            options.append(f'device_map="{placement.strategy}"')
        options.append(f"max_memory={{{memory}}}")
    else:
        options.append('device_map={"": 0}')
    if placement.quantization:
        options.append(f'quantization="{placement.quantization}"')
    return Text(f"dl.load_pair({', '.join(options)})")


def _verdict(plan: MemoryPlan) -> Text:
    least = min(plan.placements, key=lambda placement: placement.needed)
    missing = least.needed - sum(plan.memory)
    short = f"{format_bytes(missing)} short" if missing > 0 else "whole layers cannot be shared out that way"
    return Text(f"Nothing fits: even quantization {least.name} is {short}.", "bold red")
