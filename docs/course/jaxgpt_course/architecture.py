"""Draw the architecture of a config as SVG: the parts with shapes, options and parameter counts."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxgpt.config import ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.model.params import abstract_params, count_parameters, flatten_params

WIDTH = 400
STREAM = 40  # x coordinate of the residual stream
LEFT, BRANCH, RIGHT = 16, 76, 300  # left edges of boxes on the stream and next to it; right edge of all boxes
NUMBERS = WIDTH - 12  # right edge of the parameter counts
GAP, LINE = 14, 15  # distances between boxes and between lines of text
PLUS = 9  # radius of the circle of a sum

# Lines and text have the text color of the surrounding page; fills are transparent, so they suit light and dark pages.
# A page that shows the file as an image cannot set its colors, so `svg:root` sets them in dark mode.
STYLE = """
.jaxgpt-arch{max-width:100%;height:auto;font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.jaxgpt-arch text{fill:currentColor}
.jaxgpt-arch .t{font-weight:600}
.jaxgpt-arch .d{font-size:11.5px;opacity:.8}
.jaxgpt-arch .n{font-size:12px;text-anchor:end;font-variant-numeric:tabular-nums}
.jaxgpt-arch .h{font-size:15px;font-weight:600}
.jaxgpt-arch .w{fill:none;stroke:currentColor;stroke-width:1.4;opacity:.7}
.jaxgpt-arch .a{fill:currentColor;opacity:.7}
.jaxgpt-arch .f{fill:currentColor;fill-opacity:.035;stroke:currentColor;stroke-opacity:.35;stroke-dasharray:4 3}
.jaxgpt-arch .embed{fill:#3b82f6;stroke:#3b82f6}
.jaxgpt-arch .norm{fill:#8a8f98;stroke:#8a8f98}
.jaxgpt-arch .linear{fill:#e08a1e;stroke:#e08a1e}
.jaxgpt-arch .mix{fill:#2f9e6e;stroke:#2f9e6e}
.jaxgpt-arch .b{fill-opacity:.15;stroke-opacity:.75;stroke-width:1.2}
@media (prefers-color-scheme:dark){svg:root{color:#e6e6e6;background:#131416}}
""".strip().replace("\n", "")

ACTIVATIONS = {
    "gelu": "GELU",
    "gelu_new": "GELU (tanh)",
    "relu": "ReLU",
    "relu2": "ReLU\N{SUPERSCRIPT TWO}",
    "silu": "SiLU",
}
GATED = {"gelu": "GeGLU", "gelu_new": "GeGLU (tanh)", "relu": "ReGLU", "silu": "SwiGLU"}
NORMS = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "stdnorm": "norm: (x \N{MINUS SIGN} mean) / (std + \N{GREEK SMALL LETTER EPSILON})",
}
ARROW, TIMES, ROOT = "\N{RIGHTWARDS ARROW}", "\N{MULTIPLICATION SIGN}", "\N{SQUARE ROOT}"


class Part(NamedTuple):
    """A box of the figure.

    Attributes:
        title: name of the part.
        details: lines below the title.
        kind: CSS class of the color: embed, norm, linear or mix.
        parameters: number of parameters, or text in its place, such as "tied"; None: no parameters.
    """

    title: str
    details: Sequence[str]
    kind: str
    parameters: int | str | None = None


def architecture(config: ModelConfig, title: str = "") -> str:
    """Draw the model of a config as an SVG image.

    The figure shows the residual stream from ids to logits, with the sublayers that read it and add to it. Each part has its
    shape, options and number of parameters. Lines and text have the text color of the surrounding page.

    Args:
        config: the architecture, with `vocab_size` set.
        title: heading of the figure; "": no heading.

    Returns:
        An `<svg>` element, which is also a complete file: `Path("gpt2.svg").write_text(jaxgpt_course.architecture(config))`.

    Raises:
        UserError: if `vocab_size` is 0.
    """
    if not config.vocab_size:
        raise UserError("model.vocab_size is 0: set it to the vocabulary size of the tokenizer")
    one = flatten_params(abstract_params(replace(config, n_layer=1)))  # equal shapes in all blocks
    sizes = {name: math.prod(leaf.shape) for name, leaf in one.items()}
    draw = _Drawing()
    if title:
        draw.y += 8
        draw.text(WIDTH / 2, title, "h", "middle")
        draw.y += 10
    _draw_model(draw, config, sizes)
    label = html.escape(f"{title or 'Decoder'}: {config.n_layer} blocks, {count_parameters(config):,} parameters")
    height = math.ceil(draw.y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="jaxgpt-arch" role="img" aria-label="{label}" '
        f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"><title>{label}</title><style>{STYLE}</style>'
        f"{''.join(draw.under + draw.over)}</svg>"
    )


def _draw_model(draw: _Drawing, c: ModelConfig, sizes: dict[str, int]) -> None:
    def count(*prefixes: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefixes))

    D, V = c.n_embd, c.vocab_size
    draw.y += 14
    draw.text(LEFT, f"token ids [B, T], below {V:,}", "d")
    draw.y += 6
    scaled = [f"{TIMES} {ROOT}{D:,}"] if c.embed_scale else []
    draw.on_stream(Part("token embedding", [f"{V:,} {TIMES} {D:,}", *scaled], "embed", count("wte/")))
    if c.positions == "learned":
        draw.beside(Part("position embedding", [f"{c.block_size:,} {TIMES} {D:,}, learned"], "embed", count("wpe/")))
    elif c.positions == "sinusoidal":
        draw.beside(Part("sinusoidal positions", [f"T {TIMES} {D:,}, computed"], "embed"))
    draw.label(f"[B, T, {D:,}]")

    draw.begin_block(c.n_layer)
    norm = {
        name: Part(NORMS.get(c.norm, c.norm), [], "norm", count(f"h_0/{name}/") or None) for name in ("ln_1", "ln_2")
    }
    after = {name: part._replace(parameters=count(f"h_0/{name}_out/") or None) for name, part in norm.items()}
    before = draw.y

    def sublayer(name: str, parts: list[Part], source: float | None) -> None:
        has, where = c.norm != "none", c.norm_position
        if has and where in ("pre", "both"):
            parts = [norm[name], *parts]
        if has and where in ("output", "both"):
            parts = [*parts, after[name]]
        draw.branch(parts, source)
        if has and where == "post":
            draw.on_stream(norm[name])

    sublayer("ln_1", _attention(c, count), None)
    if c.mlp != "none":
        sublayer("ln_2", _mlp(c, count), before if c.parallel_residual else None)
    draw.end_block(count("h_0/"), c.n_layer)

    if c.final_norm and c.norm != "none":
        draw.on_stream(Part(NORMS.get(c.norm, c.norm), [], "norm", count("ln_f/") or None))
    shape = f"{D:,} {ARROW} {V:,}{', with bias' if c.head_bias else ''}"
    if c.tie_embeddings:
        draw.on_stream(Part("head", [shape, "the token embedding, transposed"], "linear", "tied"))
    else:
        draw.on_stream(Part("head", [shape], "linear", count("lm_head/")))
    draw.arrow_down(18)
    cap = f", soft-capped at \N{PLUS-MINUS SIGN}{c.logit_softcap:g}" if c.logit_softcap else ""
    draw.y += 14
    draw.text(LEFT, f"logits [B, T, {V:,}]{cap}", "d")
    draw.y += 12
    total = sum(sizes.values()) + (c.n_layer - 1) * count("h_0/")
    assert total == count_parameters(c)
    draw.wire(f"M{LEFT} {draw.y}H{NUMBERS}")
    draw.y += 20
    draw.text(LEFT, f"context of {c.block_size:,} tokens", "d")
    draw.text(NUMBERS, f"{total:,} parameters", "n t")
    if c.dropout:
        draw.y += LINE
        draw.text(LEFT, f"dropout {c.dropout:g}", "d")
    draw.y += 10


def _attention(c: ModelConfig, count: Callable[..., int]) -> list[Part]:
    D, N, K, H = c.n_embd, c.n_head, c.kv_heads, c.head_width
    bias = ", with bias" if c.bias or c.qkv_bias else ""
    if K == N:
        shapes = [f"each {D:,} {ARROW} {N} {TIMES} {H}{bias}"]
        heads = f"{N} head{'s' * (N > 1)} of width {H}"
    else:
        shapes = [f"q: {D:,} {ARROW} {N} {TIMES} {H}{bias}", f"k, v: {D:,} {ARROW} {K} {TIMES} {H}{bias}"]
        heads = f"{N} query heads, {K} key/value head{'s' * (K > 1)}"
    scale = f" / {ROOT}{H}" if c.scale_attn_weights else ""
    parts = [Part("queries, keys, values", shapes, "linear", count(*(f"h_0/attn/{x}_proj/" for x in "qkv")))]
    if c.qk_norm:
        which = "each head" if c.qk_norm_per_head else "all heads together"
        norms = count("h_0/attn/q_norm/", "h_0/attn/k_norm/") or None
        parts.append(Part("RMSNorm of q and k", [which], "norm", norms))
    if c.positions == "rope":
        angle = [f"base {c.rope_theta:,.0f}"]
        if c.rotary_width < H:
            angle.append(f"first {c.rotary_width} of {H} channels")
        if c.rope_local_theta:
            angle.append(f"base {c.rope_local_theta:,.0f} in local layers")
        if c.rope_factor != 1:
            angle.append(f"long wavelengths {TIMES} {c.rope_factor:g}")
        parts.append(Part("rotate q and k (RoPE)", angle, "embed"))
    lines = [heads, f"softmax(q\N{MIDDLE DOT}k{scale} + mask) v"]
    if c.scale_attn_by_inverse_layer_idx:
        lines.append("scores also divided by (layer + 1)")
    if c.sliding_window:
        lines.append(f"window of {c.sliding_window:,} tokens")
        if not all(c.windows):
            lines[-1] += ","
            lines.append(f"in {sum(map(bool, c.windows))} of {c.n_layer} layers")
    parts.append(Part("causal attention", lines, "mix"))
    if c.attn_proj:
        shape = f"{N} {TIMES} {H} {ARROW} {D:,}{', with bias' if c.bias else ''}"
        parts.append(Part("output projection", [shape], "linear", count("h_0/attn/o_proj/")))
    return parts


def _mlp(c: ModelConfig, count: Callable[..., int]) -> list[Part]:
    D, F, bias = c.n_embd, c.mlp_width, ", with bias" if c.bias else ""
    activation = ACTIVATIONS.get(c.activation, c.activation)
    up, down = count("h_0/mlp/up_proj/", "h_0/mlp/gate_proj/"), count("h_0/mlp/down_proj/")
    if c.mlp == "gated":
        name = GATED.get(c.activation, f"gated {activation}")
        first = Part(
            f"linear {TIMES} 2, {name}",
            [f"each {D:,} {ARROW} {F:,}{bias}", f"{activation}(gate) {TIMES} up"],
            "linear",
            up,
        )
    else:
        first = Part(f"linear, {activation}", [f"{D:,} {ARROW} {F:,}{bias}"], "linear", up)
    return [first, Part("linear", [f"{F:,} {ARROW} {D:,}{bias}"], "linear", down)]


class _Drawing:
    """The SVG elements of a figure, drawn from top to bottom.

    Attributes:
        y: lower end of the drawing so far.
        under: elements drawn first, behind the boxes: frames and wires.
        over: elements drawn last: boxes, arrowheads, sums and text.
    """

    def __init__(self) -> None:
        self.y = 6.0
        self.under: list[str] = []
        self.over: list[str] = []
        self._frame = 0.0

    def text(self, x: float, text: str, style: str, anchor: str = "") -> None:
        """Write a line of text with its baseline at y."""
        place = f' text-anchor="{anchor}"' if anchor else ""
        self.over.append(f'<text x="{x:g}" y="{self.y:g}" class="{style}"{place}>{html.escape(text)}</text>')

    def wire(self, path: str) -> None:
        self.under.append(f'<path class="w" d="{path}"/>')

    def arrow_down(self, length: float, x: float = STREAM) -> None:
        self.wire(f"M{x:g} {self.y:g}v{length - 4:g}")
        self.y += length
        self.over.append(f'<path class="a" d="M{x:g} {self.y:g}l-4 -7h8z"/>')

    def label(self, shape: str) -> None:
        """Write the shape of the stream next to it."""
        self.wire(f"M{STREAM} {self.y:g}v22")
        self.y += 15
        self.text(STREAM + 10, shape, "d")
        self.y += 7

    def box(self, part: Part, left: float) -> None:
        """Draw a box below y."""
        height = 25 + LINE * len(part.details)
        top = self.y
        self.over.append(
            f'<rect class="b {part.kind}" x="{left}" y="{top:g}" width="{RIGHT - left}" height="{height}" rx="6"/>'
        )
        self.y = top + 17
        self.text(left + 10, part.title, "t")
        if part.parameters is not None:
            number = part.parameters if isinstance(part.parameters, str) else f"{part.parameters:,}"
            self.text(NUMBERS, number, "n")
        for line in part.details:
            self.y += LINE
            self.text(left + 10, line, "d")
        self.y = top + height

    def on_stream(self, part: Part) -> None:
        """Draw a box on the stream: the stream passes through it."""
        self.arrow_down(GAP)
        self.box(part, LEFT)

    def plus(self, y: float) -> None:
        """Draw a sum on the stream."""
        self.over.append(
            f'<circle class="w" cx="{STREAM}" cy="{y:g}" r="{PLUS}"/>'
            f'<path class="w" d="M{STREAM - 5} {y:g}h10M{STREAM} {y - 5:g}v10"/>'
        )

    def into_plus(self, y: float, start: str) -> None:
        """Draw a sum on the stream, and a wire to its right side that begins with the SVG path `start`."""
        self.wire(f"{start}H{STREAM + PLUS + 4}")
        self.over.append(f'<path class="a" d="M{STREAM + PLUS} {y:g}l7 -4v8z"/>')
        self.plus(y)

    def beside(self, part: Part) -> None:
        """Draw a box next to the stream, and a sum that adds its output."""
        start, self.y = self.y, self.y + GAP
        top = self.y
        self.box(part, BRANCH)
        middle = (top + self.y) / 2
        self.into_plus(middle, f"M{BRANCH} {middle:g}")
        self.wire(f"M{STREAM} {start:g}V{middle - PLUS:g}M{STREAM} {middle + PLUS:g}V{self.y:g}")

    def branch(self, parts: Sequence[Part], source: float | None) -> None:
        """Draw a sublayer: boxes, a wire from the stream at `source` (None: at y), and a sum on the stream below the boxes."""
        start, middle = self.y, (BRANCH + RIGHT) / 2
        self.y += 12
        if source is None:
            self.wire(f"M{STREAM} {self.y:g}H{middle - 6:g}q6 0 6 6v2")
        else:  # parallel residual: same source as the first sublayer
            down = STREAM + 24
            self.wire(f"M{down} {source + 12:g}V{self.y - 6:g}q0 6 6 6H{middle - 6:g}q6 0 6 6v2")
        self.y += 4
        for i, part in enumerate(parts):
            self.arrow_down(GAP if i else 12, middle)
            self.box(part, BRANCH)
        self.wire(f"M{middle:g} {self.y:g}v8q0 6 -6 6")
        self.y += 14
        self.into_plus(self.y, f"M{middle - 6:g} {self.y:g}")
        self.wire(f"M{STREAM} {start:g}V{self.y - PLUS:g}")
        self.y += PLUS

    def begin_block(self, layers: int) -> None:
        """Open the frame around a block."""
        self._frame = self.y
        self.y += 20
        self.text(NUMBERS, f"block, {TIMES} {layers}", "n t")
        self.y += 2
        self.wire(f"M{STREAM} {self._frame:g}V{self.y:g}")

    def end_block(self, parameters: int, layers: int) -> None:
        """Close the frame of the block, and write the block's number of parameters in it."""
        start = self.y
        self.y += 22
        if parameters:
            self.text(NUMBERS, f"{layers} {TIMES} {parameters:,} = {layers * parameters:,}", "n t")
        self.y += 10
        self.wire(f"M{STREAM} {start:g}V{self.y:g}")
        self.under.insert(
            0,
            f'<rect class="f" x="4" y="{self._frame:g}" width="{WIDTH - 8}" height="{self.y - self._frame:g}" rx="10"/>',
        )
