"""HTML page of an inspection: self-contained, with its style, script and attention weights."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np

from jaxgpt.errors import plural
from jaxgpt.study.inspection import Inspection

DOT = "\N{MIDDLE DOT}"
SPACES = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW TO BAR}"}


def html(inspection: Inspection, title: str) -> str:
    """Return an inspection as a self-contained HTML page.

    `title` is the heading, such as the name of the model.
    """
    folder = files("jaxgpt.study")
    template = folder.joinpath("page.html").read_text("utf-8")
    style = folder.joinpath("page.css").read_text("utf-8")
    script = folder.joinpath("page.js").read_text("utf-8")

    # The template escapes all text of the model and the user.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["visible"] = visible
    return environment.from_string(template).render(
        found=inspection,
        title=title,
        summary=_summary(inspection),
        largest=inspection.norms.max() or 1.0,
        data=_script_data(inspection),
        policy=_policy(script),
        style=style,
        script=script,
        DOT=DOT,
    )


def _policy(script: str) -> str:
    """Return a content security policy that allows inline styles and this script, and nothing else."""
    digest = hashlib.sha256(script.encode()).digest()
    script_rule = f"script-src 'sha256-{base64.b64encode(digest).decode()}'"
    return f"default-src 'none'; style-src 'unsafe-inline'; {script_rule}; base-uri 'none'; form-action 'none'"


def _summary(inspection: Inspection) -> str:
    """Describe the model and the text in one line."""
    L, N, T, _ = inspection.attention.shape
    source = f"{inspection.source}: " if inspection.source else ""
    model = f"{plural(L, 'layer')} of {plural(N, 'head')}"
    text = f"{plural(T, 'token')}: {inspection.prompt} of the prompt"
    if inspection.prompt < T:
        text += f", {T - inspection.prompt} generated greedily (underlined)"
    return f"{source}{model}. {text}."


def _script_data(inspection: Inspection) -> dict[str, Any]:
    """Return the values for the script: the lower triangle of the attention maps, one byte per weight, and its labels."""
    L, N, T, _ = inspection.attention.shape
    row, column = np.tril_indices(T)
    weights = np.rint(255 * inspection.attention[:, :, row, column]).astype(np.uint8)
    return {
        "tokens": [visible(token, DOT) for token in inspection.tokens],
        "layers": L,
        "heads": N,
        "weights": base64.b64encode(weights.tobytes()).decode(),
    }


def visible(text: str, space: str = " ") -> str:
    """Make line breaks, tabs and unprintable characters visible, and replace spaces with `space`.

    Bidirectional control characters count as unprintable, because they could rearrange the page.
    """
    special = SPACES | {" ": space}
    shown = []
    for c in text:
        if c in special:
            shown.append(special[c])
        elif c.isprintable():
            shown.append(c)
        else:
            shown.append(c.encode("unicode_escape").decode())
    return "".join(shown)
