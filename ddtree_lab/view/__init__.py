"""Views of recorded data. Views know the stages' records; no stage knows a view.

The package can be called: `dl.view(x)` is a `View` of a trace, a generation, a session, a round, a tree, any stage's
record or a doctor's report. (A function of that name would be hidden as soon as a module of the package is imported.)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_lab.pair import Pair
    from ddtree_lab.view.view import View


class _CallablePackage(ModuleType):
    def __call__(self, x: Any, pair: Pair | None = None) -> View:
        """A view of `x`; nothing is displayed until it is asked for.

        Args:
            x: a trace, two of them as a pair, a generation with `record=True`, a session, a round, a tree, any
                stage's record or a doctor's report.
            pair: whose tokenizer gives the texts of tokens, for a stage's record, which holds only their numbers.

        Raises:
            TypeError: `x` is nothing that can be viewed.
        """
        from ddtree_lab.view.view import View

        return View(x, pair)


sys.modules[__name__].__class__ = _CallablePackage
