"""DDTree Lab: tree speculative decoding step by step, exact on hybrid targets.

    >>> import ddtree_lab as dl
    >>> pair = dl.load_pair()  # doctest: +SKIP
    >>> dl.generate(pair, "Count from 3 to 8.", tree_budget=32)  # doctest: +SKIP

Public names are imported when they are first used, so `import ddtree_lab` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "ddtree_lab.decode": ("Generation", "generate"),
    "ddtree_lab.doctor.diagnose": ("diagnose",),
    "ddtree_lab.doctor.port": ("Port", "TransformersPort"),
    "ddtree_lab.doctor.report": ("Finding", "Report"),
    "ddtree_lab.drafter": ("DFlashConfig", "DFlashDrafter", "DrafterContext"),
    "ddtree_lab.environment": ("describe_environment",),
    "ddtree_lab.generate_hook": ("DDTree",),
    "ddtree_lab.weightless.inspection": ("Inspection", "inspect_model"),
    "ddtree_lab.loading": ("load_pair",),
    "ddtree_lab.ngram": ("NgramDrafter",),
    "ddtree_lab.pair": ("Pair", "Prompt", "bundled_prompts"),
    "ddtree_lab.weightless.plan": ("MemoryPlan", "plan_memory"),
    "ddtree_lab.weightless.presets": ("Preset", "bundled_presets", "find_preset"),
    "ddtree_lab.recurrent.ports": ("register_port",),
    "ddtree_lab.session": ("Session",),
    "ddtree_lab.stages.cache": ("describe_cache", "fork_cache", "make_cache"),
    "ddtree_lab.stages.commit": ("commit_path",),
    "ddtree_lab.stages.draft": ("Draft", "Drafter", "draft_block", "extend_context"),
    "ddtree_lab.stages.embedding": ("resolve_embeddings",),
    "ddtree_lab.stages.forward": ("prefill",),
    "ddtree_lab.stages.mask": ("TreeMask", "build_mask"),
    "ddtree_lab.stages.tree": ("DraftTree", "build_chain", "build_tree"),
    "ddtree_lab.stages.verify": ("Verification", "verify_tree"),
    "ddtree_lab.stages.walk": ("Walk", "linear_chain", "walk_tree"),
    "ddtree_lab.weightless.synth": ("Synthesis", "synthesise"),
    "ddtree_lab.trace": ("Round", "Trace"),
    "ddtree_lab.view.chart": ("Chart", "chart"),
    "ddtree_lab.view.view": ("View",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted({*_HOME_OF, "view"})


def __getattr__(name: str) -> Any:
    if name == "view":  # a package that can be called
        return importlib.import_module("ddtree_lab.view")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from ddtree_lab.decode import Generation, generate
    from ddtree_lab.doctor.diagnose import diagnose
    from ddtree_lab.doctor.port import Port, TransformersPort
    from ddtree_lab.doctor.report import Finding, Report
    from ddtree_lab.drafter import DFlashConfig, DFlashDrafter, DrafterContext
    from ddtree_lab.environment import describe_environment
    from ddtree_lab.generate_hook import DDTree
    from ddtree_lab.loading import load_pair
    from ddtree_lab.ngram import NgramDrafter
    from ddtree_lab.pair import Pair, Prompt, bundled_prompts
    from ddtree_lab.recurrent.ports import register_port
    from ddtree_lab.session import Session
    from ddtree_lab.stages.cache import describe_cache, fork_cache, make_cache
    from ddtree_lab.stages.commit import commit_path
    from ddtree_lab.stages.draft import Draft, Drafter, draft_block, extend_context
    from ddtree_lab.stages.embedding import resolve_embeddings
    from ddtree_lab.stages.forward import prefill
    from ddtree_lab.stages.mask import TreeMask, build_mask
    from ddtree_lab.stages.tree import DraftTree, build_chain, build_tree
    from ddtree_lab.stages.verify import Verification, verify_tree
    from ddtree_lab.stages.walk import Walk, linear_chain, walk_tree
    from ddtree_lab.trace import Round, Trace
    from ddtree_lab.view.chart import Chart, chart
    from ddtree_lab.view.view import View
    from ddtree_lab.weightless.inspection import Inspection, inspect_model
    from ddtree_lab.weightless.plan import MemoryPlan, plan_memory
    from ddtree_lab.weightless.presets import Preset, bundled_presets, find_preset
    from ddtree_lab.weightless.synth import Synthesis, synthesise
