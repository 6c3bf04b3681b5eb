"""Write an inspection as one HTML page that needs no network: tables, and with JavaScript the attention of each token."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np

from jaxgpt.study.inspection import Inspection

WEIGHTS_BYTES = 1_500_000  # size limit of the attention weights, one byte each; larger models show evenly spaced layers
DOT = "\N{MIDDLE DOT}"
SPACES = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW TO BAR}"}


def html(inspection: Inspection, title: str) -> str:
    """Return the page.

    Args:
        inspection: the content.
        title: name of the model.
    """
    L, N, T, _ = inspection.attention.shape
    layers, prompt = _layers(L, N, T), inspection.prompt
    page, style, script = (
        files("jaxgpt.study").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    made = f", {T - prompt} generated, {inspection.generated} (underlined)" if prompt < T else ""
    model = f"{inspection.source}: " * bool(inspection.source)
    model += f"{L} layer{'s' * (L > 1)} of {N} head{'s' * (N > 1)}"
    summary = f"{model}. {T} token{'s' * (T > 1)}: {prompt} of the prompt{made}."
    omitted = f" {L - len(layers)} of {L} layers are omitted, to limit the size of the page." if len(layers) < L else ""
    return Template(page).substitute(
        policy=escape(policy),
        title=escape(visible(title)),
        style=style,
        summary=escape(visible(summary)),
        tokens="".join(_button(i, token, i >= prompt) for i, token in enumerate(inspection.tokens)),
        omitted=omitted,
        tables="\n".join(table(inspection) for table in (_next, _lens, _norms, _heads)),
        data=json.dumps(_data(inspection, layers)).replace("<", "\\u003c"),
        script=script,
    )


def visible(text: str, space: str = " ") -> str:
    """Return a text with visible line breaks and tabs, and escapes for other characters that cannot be printed.

    Characters that change the direction of text, and could rearrange the page, cannot be printed.
    """
    special = SPACES | {" ": space}
    return "".join(special.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)


def _layers(L: int, N: int, T: int) -> list[int]:
    """Return the layers to show."""
    shown = min(max(WEIGHTS_BYTES // (N * T * (T + 1) // 2), 1), L)
    return sorted({round(i) for i in np.linspace(0, L - 1, shown).tolist()})


def _data(inspection: Inspection, layers: list[int]) -> dict[str, Any]:
    """Return what the script reads: tokens, and the lower triangles of the attention maps in 256 steps."""
    _, N, T, _ = inspection.attention.shape
    lower = np.tril_indices(T)
    weights = np.rint(255 * inspection.attention[layers][:, :, lower[0], lower[1]]).astype(np.uint8)
    return {
        "tokens": [visible(token, DOT) for token in inspection.tokens],
        "layers": layers,
        "heads": N,
        "weights": base64.b64encode(weights.tobytes()).decode(),
    }


def _token(text: str) -> str:
    """Return a token in an element that keeps its direction, with visible spaces."""
    return f'<bdi class="w">{escape(visible(text, DOT))}</bdi>'


def _button(i: int, token: str, new: bool) -> str:
    label = escape(f'{i}: "{visible(token, DOT)}"')
    button = f'<button type="button" class="t{" new" * new}" aria-label="{label}">{_token(token)}</button>'
    return button + "<br>" * ("\n" in token)


def _table(name: str, title: str, about: str, head: Iterable[str], rows: Iterable[tuple[object, Iterable[str]]]) -> str:
    """Return a section with a table.

    Args:
        name: part of the section's id.
        title: title of the section.
        about: meaning of the numbers.
        head: names of the columns.
        rows: the first cell of each row, and the elements of the others.
    """
    columns = "".join(f'<th scope="col">{each}</th>' for each in head)
    body = "".join(f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>' for first, cells in rows)
    return (
        f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2><p>{about}</p>'
        f'<div class="wide" role="group" aria-labelledby="h-{name}" tabindex="0">'
        f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _cell(text: str, share: float | None = None) -> str:
    """Return a cell, shaded by a share of 1 if there is one."""
    return f"<td>{text}</td>" if share is None else f'<td class="s" style="--p:{share:.3f}">{text}</td>'


def _next(inspection: Inspection) -> str:
    def cells(i: int) -> list[str]:
        last = i == len(inspection.next_probability)
        follows = ["", ""] if last else [f"{inspection.next_probability[i]:.1%}", f"{inspection.next_rank[i]:,}"]
        plain = [_token(inspection.tokens[i]), *follows, f"{inspection.entropy[i]:.2f}"]
        best = zip(inspection.top_tokens[i], inspection.top_probabilities[i], strict=True)
        return [*map(_cell, plain), *(_cell(f"{_token(token)} {p:.1%}", p) for token, p in best)]

    k = inspection.top_ids.shape[1]
    about = (
        "After each token: the probability and rank of the token that follows in the text, the entropy of the prediction in "
        "nats, and the most probable tokens."
    )
    head = ["token", "after", "next token", "rank", "entropy", *(f"most probable {n}" for n in range(1, k + 1))]
    return _table("next", "Next tokens", about, head, ((i, cells(i)) for i in range(len(inspection.tokens))))


def _lens(inspection: Inspection) -> str:
    about = (
        "Logit lens: the most probable next token if the model ended before each layer, shaded by its probability. The last "
        "row is the output of the model."
    )
    cells = (
        (_cell(_token(token), p) for token, p in zip(tokens, probabilities, strict=True))
        for tokens, probabilities in zip(inspection.lens_tokens, inspection.lens_probabilities, strict=True)
    )
    return _by_layer("lens", "Predictions by layer", about, inspection, cells)


def _norms(inspection: Inspection) -> str:
    about = "Euclidean norm of the residual stream before each layer; the last row is the output of the last layer."
    most = float(inspection.norms.max()) or 1.0
    cells = ((_cell(f"{x:.3g}", x / most) for x in norms) for norms in inspection.norms)
    return _by_layer("norms", "Norms", about, inspection, cells)


def _by_layer(name: str, title: str, about: str, inspection: Inspection, cells: Iterable[Iterable[str]]) -> str:
    """Return a table with a row for the input of each layer and for the output, and a column for each token."""
    rows = zip([*range(len(inspection.attention)), "output"], cells, strict=True)
    return _table(name, title, about, ["layer", *map(_token, inspection.tokens)], rows)


def _heads(inspection: Inspection) -> str:
    about = (
        "Mean attention of each head (layer.head) to the token itself, the previous and the first one; entropy in nats"
    )
    head = ["head", "itself", "previous", "first", "entropy"]
    if inspection.without is not None:
        about += "; increase of the loss of the text, in nats per token, when the output of the head is set to zero."
        head.append("increase of the loss")
    elif len(inspection.tokens) == 1:
        about += ". A text of one token has no loss."
    else:
        about += ". The model is too large to remove each head here."

    def cells(scores: dict[str, Any]) -> Sequence[str]:
        shares = [_cell(f"{scores[name]:.0%}", scores[name]) for name in ("same", "previous", "first")]
        loss = [_cell(f"{scores['without']:+.3f}")] if "without" in scores else []
        return [*shares, _cell(f"{scores['entropy']:.2f}"), *loss]

    return _table("heads", "Heads", about, head, ((f"{s['layer']}.{s['head']}", cells(s)) for s in inspection.heads()))
