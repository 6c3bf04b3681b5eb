"""The style, the size and the labels of figures. Functions import matplotlib when they need it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.atomic import write_atomically
from jaxgpt.study.page import DOT, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"  # font of all figures, bundled with matplotlib
# Never parse text as a formula, because tokens and names of runs may contain dollar signs.
STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "font.family": FONT,
    "font.size": 9,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
GRAY = "#6b7280"
TOKEN_CHARACTERS = 14  # maximum length of the label of a token


@contextmanager
def styled() -> Iterator[None]:
    """Draw with `STYLE`, regardless of the user's matplotlib settings."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, with width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file atomically, in the format of its suffix."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
    write_atomically(path, picture.getvalue())


def drawable(text: str, space: str = " ") -> str:
    """Make characters visible, as in `visible`, and replace characters without a glyph with boxes."""
    from matplotlib import get_data_path
    from matplotlib.font_manager import get_font

    file = f"{FONT.replace(' ', '')}.ttf"
    font = get_font(str(Path(get_data_path(), "fonts", "ttf", file)))
    return "".join(c if font.get_char_index(ord(c)) else "\N{WHITE SQUARE}" for c in visible(text, space))


def token_label(token: str) -> str:
    """Return a short label for a token."""
    return shortened(drawable(token, DOT), TOKEN_CHARACTERS)


def shortened(text: str, characters: int) -> str:
    """Truncate a text to a number of characters, including the ellipsis."""
    if len(text) <= characters:
        return text
    return text[: characters - 1] + "\N{HORIZONTAL ELLIPSIS}"
