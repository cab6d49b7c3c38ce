"""One decode held still: step through its stages, go back, fork, put another tree in.

Going back costs no computation: every state of the pipeline stays valid, because no stage writes
into the tensors of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from ddtree_lab.pair import Pair, Prompt
from ddtree_lab.pipeline import STAGES, State, advance, settings_for, start
from ddtree_lab.recording import make_trace, record_round
from ddtree_lab.records import Record
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.walk import Walk, walk_tree
from ddtree_lab.trace import Round, Trace


class Session(Record):
    """A decode, one stage at a time.

    Args:
        pair: target, drafter, tokenizer.
        prompt: as in `generate`.
        method: `"ddtree"` or `"dflash"`.
        tree_budget, max_new_tokens, temperature, top_k, top_p, seed, verify_method: as in `generate`.

    Example:
        >>> session = dl.Session(pair, "Count from 3 to 8.")  # doctest: +SKIP
        >>> session.step()  # the draft  # doctest: +SKIP
        >>> session.run(rounds=1)  # to the end of the round  # doctest: +SKIP
        >>> session.back()  # before the commit  # doctest: +SKIP
    """

    def __init__(
        self,
        pair: Pair,
        prompt: str | Prompt | Sequence[int] | Tensor,
        tree_budget: int | str = 32,
        temperature: float = 0.0,
        seed: int = 0,
        *,
        method: str = "ddtree",
        max_new_tokens: int = 100,
        top_k: int | None = None,
        top_p: float | None = None,
        verify_method: str = "auto",
    ) -> None:
        self.pair = pair
        self._said: dict[str, Any] = dict(
            method=method, tree_budget=tree_budget, max_new_tokens=max_new_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, verify_method=verify_method,
        )  # fmt: skip
        self.settings = settings_for(pair, **self._said)
        self._history = [start(pair, pair.encode(prompt), self.settings)]
        # By the commit that ended it, which compares by identity; a commit that was undone is forgotten with it.
        self._rounds: WeakKeyDictionary[Record, Round] = WeakKeyDictionary()

    @property
    def state(self) -> State:
        """The state now: tokens, cache, drafter context and the records of this round."""
        return self._history[-1]

    @property
    def next_stage(self) -> str | None:
        """What `step` would run, or None at the end of the text."""
        return self.state.next_stage

    @property
    def finish_reason(self) -> str | None:
        return self.state.finish_reason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """New tokens so far."""
        return self.state.new_token_ids

    @property
    def text(self) -> str:
        return self.pair.decode(self.token_ids)

    @property
    def records(self) -> dict[str, Record]:
        """What the stages of this round have returned so far, by stage."""
        return dict(self.state.records)

    def step(self) -> Record:
        """Run the next stage and return its record.

        Raises:
            ValueError: the text has ended.
        """
        state = advance(self.pair, self.settings, self.state)
        record = list(state.records.values())[-1]
        self._history.append(state)  # last of all: an exception or Ctrl-C leaves the session where it was
        return record

    def back(self) -> State:
        """Undo the last step; nothing is computed.

        Raises:
            ValueError: there is no step to undo.
        """
        if len(self._history) == 1:
            raise ValueError(
                "session is at its start (the prompt is prefilled, no stage has run); it cannot go back."
            )
        self._history.pop()
        return self.state

    def run(self, rounds: int | None = None) -> Session:
        """Finish this round and the next ones, `rounds` in all, or to the end of the text."""
        if rounds is not None and rounds < 0:
            raise ValueError(f"rounds is {rounds}; give 0 or more, or None for the rest of the text.")
        wanted = None if rounds is None else self.state.num_rounds + rounds
        while self.next_stage is not None and (wanted is None or self.state.num_rounds < wanted):
            self.step()
        return self

    def fork(self) -> Session:
        """A second session from here on; neither sees what the other does. Copies no tensors."""
        twin = object.__new__(Session)
        twin.__dict__.update(self.__dict__)
        twin._history = list(self._history)
        return twin

    def set_tree(self, tree: DraftTree) -> DraftTree:
        """Put another tree in place of the round's drafted one; the stages after it run again.

        Raises:
            ValueError: no tree was drafted in this round yet, or its root is not the anchor, or it is
                deeper than the text may still grow.
        """
        index = self._index_of_stage("tree")
        if index is None:
            raise ValueError("tree: this round has none yet; call step() until session.next_stage is 'mask'.")
        drafted = self._history[index]
        if int(tree.token_ids[0]) != drafted.anchor_token_id:
            raise ValueError(
                f"tree has root token {int(tree.token_ids[0])}; the round's anchor is {drafted.anchor_token_id}."
            )
        deepest = drafted.remaining(self.settings) - 1
        if tree.depth > deepest:
            raise ValueError(
                f"tree is {tree.depth} deep; max_new_tokens leaves room for {deepest} in this round."
            )
        records = {**drafted.records, "tree": tree}
        self._history[index:] = [replace(drafted, records=records)]
        return tree

    def force_path(self, node: int) -> Walk:
        """Keep the path to a node of the tree whatever the target says, and go on with the target from there.

        The text is then no longer the target's own.

        Raises:
            ValueError: the round's walk has not run yet, or the tree has no such node.
        """
        index = self._index_of_stage("walk")
        if index is None:
            raise ValueError(
                "node: this round has no walk yet; call step() until session.next_stage is 'commit'."
            )
        walked = self._history[index]
        tree, walk = walked.records["tree"], walked.records["walk"]
        assert isinstance(tree, DraftTree) and isinstance(walk, Walk)
        if not 0 <= node < tree.num_nodes:
            raise ValueError(f"node is {node}; the tree has nodes 0 to {tree.num_nodes - 1}.")
        tokens, path = list(walk.target_token_ids), tree.path(node)
        for parent, child in zip(path, path[1:], strict=False):
            tokens[parent] = int(tree.token_ids[child])
        # What the target said stays on record; only the path is another one.
        forced = replace(walk, path=walk_tree(tree, tokens).path, tree=tree)
        self._history[index:] = [replace(walked, records={**walked.records, "walk": forced})]
        return forced

    def _index_of_stage(self, stage: str) -> int | None:
        """Index in the history of the state right after a stage of this round, if it has run."""
        length = STAGES.index(stage) + 1
        for index in range(len(self._history) - 1, -1, -1):
            num_records = len(self._history[index].records)
            if num_records == length:
                return index
            if num_records < length:
                return None
        return None

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The finished rounds."""
        ends = [self._history[0], *(state for state in self._history[1:] if "commit" in state.records)]
        return tuple(self._recorded(begin, end) for begin, end in zip(ends, ends[1:], strict=False))

    def _recorded(self, begin: State, end: State) -> Round:
        """A round as plain data; made once, for it takes a pass over the logits."""
        commit = end.records["commit"]
        if commit not in self._rounds:
            self._rounds[commit] = record_round(begin, end)
        return self._rounds[commit]

    @property
    def trace(self) -> Trace:
        """The finished rounds as plain data."""
        first = self._history[0]
        prompt = first.token_ids[: first.num_prompt_tokens]
        return make_trace(
            self.pair, prompt, first.new_token_ids[0], self.rounds, self._said, self.finish_reason
        )

    def __repr__(self) -> str:
        after = next(reversed(self.state.records), "prefill")
        then = f"next {self.next_stage}" if self.next_stage else f"ended ({self.finish_reason})"
        return (
            f"Session(round {self.state.num_rounds}, {len(self.token_ids)} new tokens, after {after}, {then})"
        )

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(Text(repr(self)), Text(self.text, style="bold"))
