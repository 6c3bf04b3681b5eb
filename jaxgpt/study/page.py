"""Write an inspection as one HTML page without network access: tables, and attention by token."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

import jinja2
import numpy as np

from jaxgpt.errors import plural
from jaxgpt.study.inspection import DOT, Inspection, visible


def html(inspection: Inspection, title: str) -> str:
    """Return the page of an inspection, with a title such as the name of the model."""
    template, style, script = (
        files("jaxgpt.study").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    L, N, T, _ = inspection.attention.shape
    made = f", {T - inspection.prompt} generated greedily (underlined)" if inspection.prompt < T else ""
    model = f"{inspection.source}: " * bool(inspection.source) + f"{plural(L, 'layer')} of {plural(N, 'head')}"
    row, column = np.tril_indices(T)  # entries of the attention maps, stored as bytes
    weights = np.rint(255 * inspection.attention[:, :, row, column]).astype(np.uint8)
    # All text of the model and the user is escaped by the template.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["visible"] = visible
    return environment.from_string(template).render(
        found=inspection,
        title=title,
        summary=f"{model}. {plural(T, 'token')}: {inspection.prompt} of the prompt{made}.",
        largest=inspection.norms.max() or 1.0,
        data={
            "tokens": [visible(token, DOT) for token in inspection.tokens],
            "layers": L,
            "heads": N,
            "weights": base64.b64encode(weights.tobytes()).decode(),
        },
        policy=(
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        ),
        style=style,
        script=script,
        DOT=DOT,
    )
