"""Write an inspection as one HTML page that needs no network: tables, and with JavaScript the attention of each token."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from jaxgpt.study.inspection import Inspection

BYTES = 1_500_000  # of attention weights, one byte each; of larger models, evenly spaced layers are shown
DOT = "\N{MIDDLE DOT}"
SPACES = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW TO BAR}"}


def html(found: Inspection, title: str) -> str:
    """Return the page.

    Args:
        found: what to show.
        title: name of the model.
    """
    L, N, T, _ = found.attention.shape
    layers = _layers(L, N, T)
    below = np.tril_indices(T)
    weights = np.rint(255 * found.attention[layers][:, :, below[0], below[1]]).astype(np.uint8)
    data = {
        "tokens": [visible(token, DOT) for token in found.tokens],
        "layers": layers,
        "heads": N,
        "weights": base64.b64encode(weights.tobytes()).decode(),
    }
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    body = "\n".join(
        [
            f"<header><h1>{escape(visible(title))}</h1>",
            f"<p>{L} layer{'s' * (L > 1)} of {N} head{'s' * (N > 1)}, {T} tokens: {found.prompt} of the prompt, "
            f"{T - found.prompt} generated "
            f"(underlined).</p></header>",
            _text(found),
            _attention(layers, N, L),
            _next(found),
            _lens(found),
            _norms(found),
            _heads(found),
        ]
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(visible(title))}</title><style>{STYLE}</style></head>",
            f"<body><main>{body}</main>",
            f'<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>',
            f"<script>{SCRIPT}</script></body></html>\n",
        ]
    )


def visible(text: str, space: str = " ") -> str:
    """Return a text with visible line breaks and tabs, and escapes for other characters that cannot be printed.

    Characters that change the direction of text, and could rearrange the page, cannot be printed.
    """
    special = SPACES | {" ": space}
    return "".join(special.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)


def _layers(L: int, N: int, T: int) -> list[int]:
    """Return the layers to show."""
    shown = min(max(BYTES // (N * T * (T + 1) // 2), 1), L)
    return sorted({round(i) for i in np.linspace(0, L - 1, shown).tolist()})


def _token(text: str, space: str = DOT) -> str:
    """Return a token in an element that keeps its spaces and direction."""
    return f'<bdi class="w">{escape(visible(text, space))}</bdi>'


def _text(found: Inspection) -> str:
    buttons = "".join(
        f'<button type="button" class="t{" new" if i >= found.prompt else ""}" data-i="{i}" aria-label="{i}: '
        f'{escape(visible(token, DOT))}">{_token(token, " ")}</button>' + ("<br>" if "\n" in token else "")
        for i, token in enumerate(found.tokens)
    )
    return (
        f'<section aria-labelledby="h-text"><h2 id="h-text">Text</h2><p class="js">Point at a token, tap it, or move with the '
        f"arrow keys: the other tokens are shaded by its attention to them, in the head chosen below.</p>"
        f'<div class="tokens">{buttons}'
        f'</div><p class="js" id="says" role="status"></p></section>'
    )


def _attention(layers: Sequence[int], N: int, L: int) -> str:
    rows = "".join(
        f'<tr><th scope="row">{layer}</th>'
        + "".join(
            f'<td><button type="button" class="h" data-l="{row}" data-n="{n}" aria-pressed="false" '
            f'aria-label="layer {layer}, head {n}"><canvas></canvas></button></td>'
            for n in range(N)
        )
        + "</tr>"
        for row, layer in enumerate(layers)
    )
    head = "".join(f'<th scope="col">{n}</th>' for n in range(N))
    left_out = (
        f" {L - len(layers)} of {L} layers are left out, to limit the size of the page." if len(layers) < L else ""
    )
    return (
        f'<section class="js" aria-labelledby="h-att"><h2 id="h-att">Attention</h2><p>A picture for each head: a row for each '
        f"token, shaded by the square root of its attention to the tokens in the columns. Choose one to enlarge it."
        f"{left_out}</p>"
        f'<div class="two"><div class="wide" role="group" aria-label="All heads" tabindex="0"><table class="maps"><thead><tr>'
        f'<th scope="col">layer</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<figure><canvas id="large" role="img" aria-label="attention of the chosen head"></canvas>'
        f'<figcaption id="chosen"></figcaption></figure></div></section>'
    )


def _table(name: str, title: str, about: str, head: Sequence[str], rows: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (
        f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2><p>{about}</p><div class="wide" role="group" '
        f'aria-labelledby="h-{name}" tabindex="0"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        f"</div></section>"
    )


def _shaded(text: str, share: float) -> str:
    return f'<td class="s" style="--p:{min(max(share, 0.0), 1.0):.3f}">{text}</td>'


def _next(found: Inspection) -> str:
    def row(i: int) -> str:
        follows = found.next_probability[i] if i < len(found.next_probability) else None
        cells = "<td></td><td></td>" if follows is None else f"<td>{follows:.1%}</td><td>{found.next_rank[i]:,}</td>"
        best = "".join(
            _shaded(f"{_token(word)} {p:.1%}", float(p))
            for word, p in zip(found.top_tokens[i], found.top_probabilities[i], strict=True)
        )
        first = f'<th scope="row">{i}</th><td>{_token(found.tokens[i])}</td>'
        return f'<tr data-i="{i}">{first}{cells}<td>{found.entropy[i]:.2f}</td>{best}</tr>'

    k = found.top_ids.shape[1]
    head = ["token", "after", "next token", "rank", "entropy", *(f"most probable {n}" for n in range(1, k + 1))]
    about = (
        "After each token: the probability and rank of the token that follows in the text, the entropy of the prediction in "
        "nats, and the most probable tokens."
    )
    return _table("next", "Next tokens", about, head, map(row, range(len(found.tokens))))


def _across(found: Inspection) -> list[str]:
    return ["layer", *(_token(token) for token in found.tokens)]


def _lens(found: Inspection) -> str:
    def row(layer: int) -> str:
        cells = zip(found.lens_tokens[layer], found.lens_probabilities[layer], strict=True)
        return f'<tr><th scope="row">{layer}</th>{"".join(_shaded(_token(word), float(p)) for word, p in cells)}</tr>'

    about = (
        "Logit lens: the most probable next token if the model ended before each layer, shaded by its probability. The first "
        "row is the output of the model."
    )
    return _table("lens", "Predictions by layer", about, _across(found), map(row, reversed(range(len(found.norms)))))


def _norms(found: Inspection) -> str:
    most = float(found.norms.max()) or 1.0

    def row(layer: int) -> str:
        cells = "".join(_shaded(f"{x:.3g}", float(x) / most) for x in found.norms[layer])
        return f'<tr><th scope="row">{layer}</th>{cells}</tr>'

    about = "Euclidean norm of the residual stream before each layer; the first row is the output of the last layer."
    return _table("norms", "Norms", about, _across(found), map(row, reversed(range(len(found.norms)))))


def _heads(found: Inspection) -> str:
    rows = (
        f'<tr><th scope="row">{each["layer"]}.{each["head"]}</th>'
        + "".join(_shaded(f"{each[name]:.0%}", each[name]) for name in ("same", "previous", "first"))
        + f"<td>{each['entropy']:.2f}</td>"
        + (f"<td>{each['without']:+.3f}</td>" if "without" in each else "")
        + "</tr>"
        for each in found.heads()
    )
    about = (
        "Mean attention of each head (layer.head) to the token itself, the previous and the first one; entropy in nats"
    )
    head = ["head", "itself", "previous", "first", "entropy"]
    if found.without is None:
        one = len(found.tokens) == 1
        about += (
            f". {'A text of one token has no loss.' if one else 'The model is too large to remove each head here.'}"
        )
    else:
        about += "; increase of the loss of the text, in nats per token, when the output of the head is set to zero."
        head.append("increase of the loss")
    return _table("heads", "Heads", about, head, rows)


STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1f2937;--muted:#5b6472;--line:#d1d5db;
--accent:92 174 248;--ink:31 84 158;--mark:#b45309}
@media(prefers-color-scheme:dark){:root{--bg:#11151c;--fg:#e5e7eb;--muted:#a3adbb;--line:#374151;
--accent:38 106 178;--ink:125 190 255;--mark:#fbbf24}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:75rem;margin:0 auto;padding:1rem}
h1{font-size:1.4rem;margin:.5rem 0 0}h2{font-size:1.1rem;margin:2rem 0 .25rem}
p{color:var(--muted);margin:.25rem 0 .75rem;max-width:60rem}
.w{white-space:pre-wrap;overflow-wrap:anywhere}
.tokens{line-height:2.1}
button{font:inherit;color:inherit;background:none;border:1px solid transparent;border-radius:3px;padding:0;cursor:pointer}
.t{font-family:ui-monospace,monospace;padding:.1rem .15rem;margin:0 1px 0 0;border-color:var(--line)}
.t.new{border-bottom:2px solid var(--muted)}
.t[aria-current]{outline:2px solid var(--mark);outline-offset:1px}
.wide{overflow:auto;max-height:32rem}
table{border-collapse:collapse;font-size:.85rem}
th,td{padding:.15rem .5rem;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap;
font-variant-numeric:tabular-nums}
thead th{position:sticky;top:0;background:var(--bg);font-weight:600}
th[scope=row]{color:var(--muted);font-weight:400}
td .w,thead .w{font-family:ui-monospace,monospace;white-space:pre}
.s{background:rgb(var(--accent)/calc(var(--p)*.85))}
tr.on>*{box-shadow:inset 0 2px var(--mark),inset 0 -2px var(--mark)}
.two{display:flex;flex-wrap:wrap;gap:1rem;align-items:flex-start}
.two .wide{max-width:100%}
.maps td,.maps th{border:0;padding:2px}
.h canvas{width:3.2rem;height:3.2rem;image-rendering:pixelated;display:block;border:1px solid var(--line)}
.h[aria-pressed=true]{outline:2px solid var(--mark)}
figure{margin:0;flex:0 0 auto;max-width:100%}
#large{width:24rem;max-width:100%;image-rendering:pixelated;border:1px solid var(--line);display:block}
figcaption{color:var(--muted);font-size:.85rem}
.js{display:none}.on-js .js{display:block}
@media print{.js,.on-js .js{display:none}.wide{overflow:visible;max-height:none}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""

SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = Uint8Array.from(atob(data.weights), c => c.charCodeAt(0));
const T = data.tokens.length, triangle = T * (T + 1) / 2;
const at = (l, n, i, j) => j > i ? 0 : bytes[(l * data.heads + n) * triangle + i * (i + 1) / 2 + j] / 255;
const tokens = [...document.querySelectorAll(".t")], heads = [...document.querySelectorAll(".h")];
const rows = [...document.querySelectorAll("tr[data-i]")], large = document.getElementById("large");
let head = [data.layers.length - 1, 0], kept = T - 1, shown = kept;
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(canvas, l, n, row) {
  canvas.width = canvas.height = T;
  const context = canvas.getContext("2d"), image = context.createImageData(T, T);
  const [r, g, b] = color("--ink").split(" ").map(Number);
  for (let i = 0; i < T; i++) for (let j = 0; j <= i; j++)
    image.data.set([r, g, b, 255 * Math.sqrt(at(l, n, i, j)) * (row === undefined || row === i ? 1 : 0.45)], 4 * (i * T + j));
  context.putImageData(image, 0, 0);
}
function show(i) {
  shown = i;
  const [l, n] = head, seen = [], accent = color("--accent");
  tokens.forEach((token, j) => {
    const p = at(l, n, i, j);
    token.style.backgroundColor = p ? `rgb(${accent} / ${p * 0.85})` : "";
    if (j === i) token.setAttribute("aria-current", "true"); else token.removeAttribute("aria-current");
    if (p >= 0.005) seen.push([p, j]);
  });
  rows.forEach((row, j) => row.classList.toggle("on", j === i));
  seen.sort((a, b) => b[0] - a[0]);
  const list = seen.slice(0, 5).map(([p, j]) => `${data.tokens[j]} (${j}) ${Math.round(100 * p)}%`).join(", ");
  document.getElementById("says").textContent =
    `Layer ${data.layers[l]}, head ${n}: token ${i}, ${data.tokens[i]}, attends to ${list}`;
  draw(large, l, n, i);
}
function choose(l, n) {
  head = [l, n];
  heads.forEach(h => h.setAttribute("aria-pressed", String(+h.dataset.l === l && +h.dataset.n === n)));
  document.getElementById("chosen").textContent = `Layer ${data.layers[l]}, head ${n}: rows attend to columns.`;
  show(shown);
}
function move(list, event, step) {
  const to = list[list.indexOf(document.activeElement) + step];
  if (to) { to.focus(); event.preventDefault(); }
}
tokens.forEach((token, i) => {
  token.addEventListener("mouseenter", () => show(i));
  token.addEventListener("mouseleave", () => show(kept));
  for (const kind of ["focus", "click"]) token.addEventListener(kind, () => { kept = i; show(i); });
  token.addEventListener("keydown", e => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (step) move(tokens, e, step);
  });
});
heads.forEach(h => {
  h.addEventListener("click", () => choose(+h.dataset.l, +h.dataset.n));
  h.addEventListener("keydown", e => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -data.heads, ArrowDown: data.heads }[e.key];
    if (step) move(heads, e, step);
  });
});
function all() {
  heads.forEach(h => draw(h.firstChild, +h.dataset.l, +h.dataset.n));
  choose(...head);
}
document.documentElement.classList.add("on-js");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
all();
"""
