"""A matplotlib figure as a notebook output that says what it shows, looks the same in both themes, and is small."""

from __future__ import annotations

import base64
import html
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddtree_lab.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers too; its black and yellow are left to text and marks.
BLUE, ORANGE, GREEN, PINK, SKY, AMBER, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6E6E6E",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Chart(Record):
    """A figure with its description.

    Args:
        svg: the picture, on an opaque background.
        description: what it shows, for readers who do not see it.
    """

    svg: str
    description: str

    def __repr__(self) -> str:
        return f"Chart({self.description})"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        data = base64.b64encode(self.svg.encode()).decode()
        image = (
            f'<img alt="{html.escape(self.description)}" style="max-width:100%" '
            f'src="data:image/svg+xml;base64,{data}">'
        )
        return {"text/plain": self.description, "text/html": image}


def chart(figure: Figure, description: str) -> Chart:
    """Draw a matplotlib figure and close it.

    Args:
        figure: any; its background becomes white.
        description: what it shows, in a sentence.

    Raises:
        ValueError: no description.
    """
    if not description.strip():
        raise ValueError("description is empty; say in a sentence what the figure shows.")
    import matplotlib
    from matplotlib import pyplot as plt

    out = io.StringIO()
    # Text stays text and ids follow from the content, so that the same figure is the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ddtree-lab"}):
        figure.savefig(out, format="svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(figure)
    return Chart(out.getvalue(), description)
