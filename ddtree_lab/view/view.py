"""One view of one object, with all its faces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_lab.records import TEXT_WIDTH, Record
from ddtree_lab.trace.files import write_atomically
from ddtree_lab.view import dot, html, sheet_svg, sheet_text, svg, text
from ddtree_lab.view.numbers import title as round_title
from ddtree_lab.view.subjects import Subject, embedded, is_session, subject_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ddtree_lab.pair import Pair
    from ddtree_lab.view.widget import LiveView


class View(Record):
    """What `dl.view` returns: it draws itself in a notebook, prints in a terminal, and saves to files.

    Args:
        x: what is viewed.
        pair: whose tokenizer gives the texts of tokens, for a stage's record, which holds only their numbers.

    Example:
        >>> dl.view(trace)  # a notebook shows it  # doctest: +SKIP
        >>> dl.view(trace).save_html("trace.html")  # doctest: +SKIP
    """

    def __init__(self, x: Any, pair: Pair | None = None) -> None:
        # What is drawn is plain data by now: a view keeps no logits and no caches alive, and only a session's a model.
        self._session = x if is_session(x) else None
        self._subject = subject_of(x, pair)

    def __repr__(self) -> str:
        return f"View({self._subject.name})"

    @property
    def payload(self) -> dict[str, Any] | None:
        """What the browser code is given: plain JSON data. None where the view is a text."""
        return self._subject.payload

    def __rich__(self) -> RenderableType:
        return draw(self._subject)

    def to_text(
        self,
        *,
        width: int = TEXT_WIDTH,
        ascii: bool = False,  # noqa: A002
        round_index: int | None = None,
        max_nodes: int | None = text.MAX_NODES,
    ) -> str:
        """The view as plain text.

        Args:
            width: columns; a deep tree takes what it needs.
            ascii: with ASCII characters only.
            round_index: of the one round to draw; where not given, all up to 40.
            max_nodes: the least likely nodes beyond are counted, not shown; None shows all.
        """
        drawn = _Drawn(self.drawing(round_index, max_nodes), repr(self))
        return drawn.to_text(width=max(width, _columns(self._subject)), ascii=ascii)

    def drawing(
        self, round_index: int | None = None, max_nodes: int | None = text.MAX_NODES
    ) -> RenderableType:
        """What `rich` prints; arguments as in `to_text`."""
        return draw(self._subject, round_index, max_nodes)

    @property
    def overview(self) -> RenderableType:
        """A trace in one screen: its settings and text, a line a round, and the tree of one of them."""
        return text.draw_overview(_trace_of(self._subject, "an overview"))

    def to_svg(
        self, *, round_index: int | None = None, theme: str = "auto", max_nodes: int | None = svg.MAX_NODES
    ) -> str:
        """The view as an SVG picture.

        Args:
            round_index: of the round to draw; where not given, one that kept many drafts.
            theme: `"auto"` follows the reader's, `"light"` and `"dark"` are fixed.
            max_nodes: the least likely nodes beyond are counted, not drawn; None draws all.

        Raises:
            ValueError: no such round or theme, or a record that is only text.
        """
        return _picture(self._subject, round_index, max_nodes).to_svg(theme)

    def to_html(self) -> str:
        """The view as a whole, self-contained page."""
        return _page(self._subject, self.to_text())

    def to_dot(self, *, round_index: int | None = None) -> str:
        """The tree of a round in Graphviz's language.

        Raises:
            ValueError: no such round, or no tree in what is viewed.
        """
        payload = _trace_of(self._subject, "a Graphviz graph")
        return dot.to_dot(payload["rounds"][text.shown_round(payload, round_index)])

    def draw_dot(self, *, round_index: int | None = None) -> tuple[str, str]:
        """Who drew it and the SVG: Graphviz's `dot`, else the package `graphviz-pure`, else this package itself."""
        drawn = dot.render(self.to_dot(round_index=round_index))
        return (
            ("ddtree-lab", self.to_svg(round_index=round_index))
            if drawn is None
            else (drawn[0], drawn[1].decode())
        )

    def picture(self, *, round_index: int | None = None, max_nodes: int | None = svg.MAX_NODES) -> Picture:
        """The picture alone, its text folded away, where a notebook should stay short; arguments as in `to_svg`."""
        text = self.to_text(round_index=round_index, max_nodes=max_nodes)
        drawn = _picture(self._subject, round_index, max_nodes).to_svg("light")
        title = self._subject.payload["title"] if self._subject.payload else self._subject.name
        return Picture(title, drawn, text)

    def save_html(self, path: str | Path) -> None:
        """Write a self-contained page; nothing in it is fetched."""
        write_atomically(path, self.to_html())

    def save_svg(self, path: str | Path, **options: Any) -> None:
        """Write an SVG picture; `options` as in `to_svg`."""
        write_atomically(path, self.to_svg(**options))

    def save_dot(self, path: str | Path, *, round_index: int | None = None) -> None:
        """Write a round's tree in Graphviz's language."""
        write_atomically(path, self.to_dot(round_index=round_index))

    def save_png(self, path: str | Path, *, scale: int = 2, theme: str = "light", **options: Any) -> None:
        """Write a PNG picture.

        Args:
            scale: pixels for each unit of the SVG.
            theme: `"light"` or `"dark"`.
            options: as in `to_svg`.

        Raises:
            RuntimeError: no converter is installed, with what to install.
        """
        from ddtree_lab.view.png import convert

        write_atomically(path, convert(self.to_svg(theme=theme, **options), scale))

    def live(self) -> LiveView:
        """A widget on which the tree can be changed and verified again.

        Raises:
            TypeError: what is viewed is not a session, which alone has the models.
            ImportError: anywidget is not installed.
        """
        try:
            from ddtree_lab.view.widget import LiveView
        except ModuleNotFoundError as fault:
            raise ImportError(f"live() needs {fault.name}: pip install 'ddtree-lab[notebook]'") from fault
        if self._session is None:
            raise TypeError(
                f"{self._subject.name} cannot be changed and verified again; view a Session, which has the models."
            )
        return LiveView(self._session)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """HTML for notebooks, SVG and text for everything else."""
        subject = embedded(self._subject)
        plain = self.to_text()
        if subject.payload is None:
            return {"text/plain": plain, "text/html": html.preformatted(plain)}
        picture = _picture(subject, None, svg.MAX_NODES).to_svg()
        document = _page(subject, plain)
        return {
            "text/plain": plain,
            "text/html": html.frame(document, subject.payload["title"], picture, plain),
            "image/svg+xml": picture,
        }


class Picture(Record):
    """A picture that shows itself in a notebook, light in both themes; it runs nothing."""

    def __init__(self, title: str, drawn: str, text: str) -> None:
        self._title, self.svg, self._text = title, drawn, text

    def __repr__(self) -> str:
        return f"Picture({self._title})"

    def __rich__(self) -> str:
        from rich.markup import escape

        return escape(self._text)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self._text, "text/html": html.still(self._title, self.svg, self._text)}


def print_text(drawing: RenderableType, *, ascii: bool = False) -> None:  # noqa: A002
    """Print for whoever reads stdout: in colour and as wide as the terminal is, or plain ASCII."""
    from rich.console import Console

    console = Console(highlight=False)
    if ascii or console.options.ascii_only:
        print(_Drawn(drawing, "").to_text(width=console.width, ascii=True))
    else:
        console.print(drawing)


class _Drawn(Record):
    """Something drawn for the terminal that prints as text."""

    def __init__(self, drawing: RenderableType, name: str) -> None:
        self._drawing, self._name = drawing, name

    def __repr__(self) -> str:
        return self._name

    def __rich__(self) -> RenderableType:
        return self._drawing


def draw(
    subject: Subject,
    round_index: int | None = None,
    max_nodes: int | None = text.MAX_NODES,
) -> RenderableType:
    """The subject in the terminal."""
    payload = subject.payload
    if subject.record is not None or payload is None:
        assert subject.record is not None
        return subject.record
    if payload["kind"] == "diff":
        return text.draw_diff(payload, max_nodes)
    if payload["kind"] == "sheet":
        return sheet_text.draw_sheet(payload)
    return text.draw_trace(
        payload, None if round_index is None else text.shown_round(payload, round_index), max_nodes
    )


def _columns(subject: Subject) -> int:
    """Columns that the deepest tree or the widest table needs."""
    payload = subject.payload or {}
    if payload.get("kind") == "sheet":
        return sheet_text.columns(payload)
    traces = [payload[side] for side in "ab"] if payload.get("kind") == "diff" else [payload]
    depths = (max(round_["depths"]) for trace in traces for round_ in trace.get("rounds", ()))
    return 4 * max(depths, default=0) + 60


def _picture(subject: Subject, round_index: int | None, max_nodes: int | None) -> svg.Picture:
    payload = subject.payload
    if payload is None:
        raise ValueError(f"{subject.name} is shown as text and has no picture; use to_text or save_html.")
    if payload["kind"] == "leaks":
        return svg.draw_leaks(payload)
    if payload["kind"] == "sheet":
        return sheet_svg.draw_sheet(payload)
    if payload["kind"] == "diff":
        return svg.draw_diff(payload, max_nodes)
    if not payload["rounds"]:
        return svg.draw_nothing(payload["title"])
    index = text.shown_round(payload, round_index)
    number = payload["round_numbers"][index] + 1
    before = [*payload["prompt"]["texts"], *payload["first"]["texts"]]
    before += [token for round_ in payload["rounds"][:index] for token in round_["emitted_texts"]]
    heading = round_title(payload["rounds"][index], number, payload["num_rounds"])
    note = f"after {text.running(before)}" if before else ""
    return svg.draw_round(payload["rounds"][index], heading, note, max_nodes)


def _page(subject: Subject, plain: str) -> str:
    if subject.payload is None:
        return html.page(subject.name, plain)
    picture = _picture(subject, None, svg.MAX_NODES).to_svg()
    return html.page(subject.payload["title"], plain, picture, subject.payload)


def _trace_of(subject: Subject, what: str) -> dict[str, Any]:
    if subject.payload is None or subject.payload["kind"] != "trace":
        raise ValueError(
            f"{subject.name} cannot be drawn as {what}; view a trace, a session, a round or a tree."
        )
    return subject.payload
