"""The live view: a session's tree can be changed in the notebook, and the model verifies it again.

The browser sends requests with an id and gets the new payload or one sentence about what went wrong. Nothing is drawn
by the kernel, so when it is lost the last picture stays and everything that needs no model goes on working.
"""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from ddtree_lab.pair import Pair
from ddtree_lab.session import Session
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.trace import checks
from ddtree_lab.view import html
from ddtree_lab.view.subjects import session_payload


class LiveView(anywidget.AnyWidget):
    """A widget on a session.

    Args:
        session: is forked for every change and stays as it was.

    Attributes:
        selection: the round and node that are selected in the browser.
        changed: the fork of the last change, a session of its own; None before the first.
    """

    payload = traitlets.Dict().tag(sync=True)
    selection = traitlets.Dict()
    changed = traitlets.Any(None, allow_none=True)

    def __init__(self, session: Session) -> None:
        self._esm, self._css = html.script_text(), html.asset("viewer.css")
        super().__init__(payload=session_payload(session))
        self.session = session
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return f"LiveView({self.session!r})"

    def verify(self, round_index: int, tree: DraftTree, force: int | None = None) -> Session:
        """Let the model verify another tree in a round, and go on for as many rounds as the session has.

        Args:
            round_index: of the session's trace.
            tree: its root is the round's anchor.
            force: a node whose path is kept whatever the target says.

        Raises:
            ValueError: there is no such round, or the tree does not fit into it.
        """
        fork = at_tree(self.session, round_index)
        fork.set_tree(tree)
        if force is not None:
            while fork.next_stage != "commit":
                fork.step()
            fork.force_path(force)
        fork.run(rounds=1)
        fork.run(rounds=max(0, self.session.state.num_rounds - fork.state.num_rounds))
        self.changed = fork
        return fork

    def _answer(self, widget: Any, message: Any, buffers: Any) -> None:
        """A message from the browser; whatever goes wrong goes back to it."""
        request = message if isinstance(message, dict) else {}
        if request.get("kind") == "select":
            self.selection = {name: request.get(name) for name in ("round", "node")}
            return
        try:
            if request.get("kind") != "verify":
                raise ValueError(f"message of kind {checks.short(request.get('kind'))} is not known.")
            fork = self._requested(request)
        except Exception as fault:
            self.send({"id": request.get("id"), "error": f"{type(fault).__name__}: {fault}"})
        else:
            self.send({"id": request.get("id"), "payload": session_payload(fork)})

    def _requested(self, request: dict[str, Any]) -> Session:
        tree = edited_tree(checks.entry(request, "tree"), self.session.pair)
        force = None if request.get("force") is None else checks.integer(request, "force")
        return self.verify(checks.integer(request, "round"), tree, force)


def at_tree(session: Session, round_index: int) -> Session:
    """A fork of a session, right after the tree of a round was drafted.

    Raises:
        ValueError: the session has no tree in that round.
    """
    fork = session.fork()
    while (fork.state.num_rounds, list(fork.records)[-1:]) != (round_index, ["tree"]):
        try:
            fork.back()
        except ValueError:
            raise ValueError(f"round {round_index + 1} of the session has no tree to change.") from None
    return fork


def edited_tree(data: Any, pair: Pair) -> DraftTree:
    """A tree as the browser sends it: columns, with texts in place of token ids it does not know.

    Raises:
        ValueError: a text that is not exactly one token, or columns that are no tree.
    """
    texts, ids = checks.entry(data, "texts"), checks.entry(data, "ids")
    if not isinstance(ids, list) or not isinstance(texts, list) or len(ids) != len(texts):
        raise ValueError("ids and texts are not lists of one length.")
    known = [
        one_token(pair, text) if token is None else token for token, text in zip(ids, texts, strict=True)
    ]
    token_ids = checks.integers({"ids": known}, "ids")
    n = len(token_ids)
    return DraftTree.from_parents(
        token_ids,
        checks.integers(data, "parents", n, least=-1),
        checks.integers(data, "ranks", n, least=-1),
        checks.log_probs(data, "log_probs", n),
    )


def one_token(pair: Pair, text: Any) -> int:
    """The token that a text is.

    Raises:
        ValueError: it is several tokens, or none.
    """
    if pair.tokenizer is None:
        raise ValueError("the pair has no tokenizer, so a child cannot be named by its text.")
    tokens = pair.tokenizer.encode(checks.string(text), add_special_tokens=False)
    if len(tokens) != 1:
        parts = [pair.decode([token], skip_special_tokens=False) for token in tokens]
        raise ValueError(f"{text!r} is {len(tokens)} tokens {parts}; a child is exactly one token.")
    return int(tokens[0])
