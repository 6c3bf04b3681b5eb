"""Inspect a model on one text: predictions, attention, logit lens and norms, as arrays or HTML."""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jinja2
import numpy as np

from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.decoding.sampling import DIVERGED
from jaxgpt.errors import UserError, plural
from jaxgpt.lm import LM, generate
from jaxgpt.lm.arguments import encode_prompt, start_ids
from jaxgpt.lm.engine import round_up
from jaxgpt.lm.model import OnlyIds, only_text
from jaxgpt.lm.text import UNFINISHED
from jaxgpt.model import GPT
from jaxgpt.model.params import count_parameters
from jaxgpt.study.heads import entropy
from jaxgpt.study.interventions import sweep
from jaxgpt.study.lens import read_layers
from jaxgpt.study.run import forward, layer_names, on_tokens, stream_names
from jaxgpt.train.loss import log_likelihood

INSPECTED_TOKENS = 128  # maximum number of tokens of an inspected text
TOP = 5  # maximum number of most probable tokens shown at each position
DOT = "\N{MIDDLE DOT}"
SPACES = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW TO BAR}"}
ABLATION = 10**12  # maximum FLOPs of ablating each head in turn: about a minute on two cores


class Inspection(NamedTuple):
    """The predictions and activations of a model for a text of T tokens.

    Arrays of L + 1 layers contain values for the input of each block and for the output of the last block. Entropies
    and losses are in nats.
    """

    source: str  # run and step of the model (`LM.source`); empty: built in Python
    ids: list[int]  # `[T]`
    tokens: list[str]  # texts of the ids
    prompt: int  # number of prompt tokens, before the greedily generated tokens
    top_ids: np.ndarray  # the most probable next tokens after each token, `[T, k]`
    top_probabilities: np.ndarray
    top_tokens: list[list[str]]
    entropy: np.ndarray  # entropy of the next token after each token, `[T]`
    next_probability: np.ndarray  # probability of the actual next token, `[T - 1]`
    next_rank: np.ndarray  # rank of the actual next token, 1 for the most probable token, `[T - 1]`
    attention: np.ndarray  # attention weights of each query over the keys, `[L, N, T, T]`
    lens_tokens: list[list[str]]  # the logit lens: the most probable next token at each layer, `[L + 1][T]`
    lens_probabilities: np.ndarray
    norms: np.ndarray  # Euclidean norms of the residual stream, `[L + 1, T]`
    without: np.ndarray | None  # increase of the loss per token with each head ablated, `[L, N]`; None: not computed

    def heads(self) -> list[dict[str, Any]]:
        """Summarize each head: mean attention to the current (`same`), the `previous` and the `first` token.

        The means omit the first query, unless it is the only query. The dicts also have `layer`, `head`, the mean `entropy`
        and, if computed, `without`.
        """
        several = len(self.ids) > 1
        own, before = (np.diagonal(self.attention, offset, 2, 3) for offset in (0, -1))
        values = {
            "same": own[..., several:].mean(-1),
            "previous": before.mean(-1) if several else np.zeros(own.shape[:2]),
            "first": self.attention[:, :, several:, 0].mean(-1),
            "entropy": np.asarray(entropy(jnp.asarray(self.attention)))[..., several:].mean(-1),
        }
        if self.without is not None:
            values["without"] = self.without
        return [
            {"layer": layer, "head": head} | {name: float(value[layer, head]) for name, value in values.items()}
            for layer, head in np.ndindex(own.shape[:2])
        ]

    def to_json(self) -> dict[str, Any]:
        """Return all values but the attention maps, which are summarized by `heads`."""
        values = self._asdict()
        del values["attention"]
        arrays = {name: value.tolist() for name, value in values.items() if isinstance(value, np.ndarray)}
        return values | arrays | {"heads": self.heads()}


def inspect(lm: LM, prompt: str, *, max_new_tokens: int = 20) -> Inspection:
    """Continue a prompt greedily, and inspect the model on the whole text.

    Args:
        prompt: the text to continue; empty: start a new text.
        max_new_tokens: maximum number of new tokens (greedy decoding); 0: inspect the prompt alone.

    Raises:
        UserError: as in `generate`, or if the prompt and `max_new_tokens` exceed 128 tokens or the context length, or the
            weights have diverged.
    """
    model, only = lm.config.model, only_text(lm)
    ids = encode_prompt(lm.tokenizer, model.vocab_size, prompt) or start_ids(lm.tokenizer)
    limit, before = min(INSPECTED_TOKENS, model.block_size), len(ids)
    if before + max_new_tokens > limit:
        raise UserError(
            f"a prompt of {before} tokens and {max_new_tokens} new tokens exceed the limit of {limit}: shorten the "
            f"prompt, or lower max_new_tokens"
        )
    if max_new_tokens:
        ids = ids + generate(lm, [ids], max_new_tokens=max_new_tokens, temperature=0)[0].ids
    # Pad the text to a power of two, within the limit: texts of similar lengths then share a compiled program.
    T, size = len(ids), min(limit, round_up(len(ids), 8))
    ablations = model.n_layer * model.n_head
    ablate = T > 1 and 2 * count_parameters(lm.gpt) * T * ablations <= ABLATION
    found = jax.device_get(on_tokens(_compute, lm, np.pad([ids], ((0, 0), (0, size - T))), np.int32(T), only, ablate))
    log_p = found.log_p_TV[:T]
    if np.isnan(log_p).any():
        raise UserError(DIVERGED)
    p, follows = np.exp(log_p), log_p[np.arange(T - 1), ids[1:]]
    k = min(TOP, int(np.isfinite(log_p[0]).sum()))
    best = np.argsort(-log_p, axis=-1, kind="stable")[:, :k]

    word = partial(token_text, lm.tokenizer, first=ids[0])
    return Inspection(
        source=lm.source,
        ids=ids,
        tokens=[token_text(lm.tokenizer, ids[0]), *map(word, ids[1:])],
        prompt=before,
        top_ids=best,
        top_probabilities=np.take_along_axis(p, best, -1),
        top_tokens=[[word(i) for i in row] for row in best.tolist()],
        entropy=-(p * np.where(p > 0, log_p, 0.0)).sum(-1),
        next_probability=np.exp(follows),
        next_rank=1 + (log_p[:-1] > follows[:, None]).sum(-1),
        attention=found.attention_LNTT[:, :, :T, :T],
        lens_tokens=[[word(i) for i in row] for row in found.lens_LT[:, :T].tolist()],
        lens_probabilities=found.lens_p_LT[:, :T],
        norms=np.linalg.norm(found.stream_LTD[:, :T].astype(np.float64), axis=-1),
        without=found.without_LN,
    )


class _Computed(NamedTuple):
    """The arrays of an inspection; positions after the text are padding."""

    log_p_TV: Any
    stream_LTD: Any
    attention_LNTT: Any
    lens_LT: Any
    lens_p_LT: Any
    without_LN: Any


@partial(jax.jit, static_argnums=(0, 4, 5))
def _compute(
    model: GPT, params: Any, tokens_1T: jax.Array, length: jax.Array, only: OnlyIds, ablate: bool
) -> _Computed:
    config = model.config
    T = tokens_1T.shape[1]
    stream = stream_names(config)
    patterns = layer_names(config, "attn.pattern")
    out = forward(model, params, tokens_1T, (*stream, *patterns))
    layers = read_layers(model, params, tokens_1T, 1, only)
    without_LN = None
    if ablate:

        def loss(logits_1TV: jax.Array) -> jax.Array:
            """Compute the mean loss of the tokens from the second to the last."""
            log_p_1T = log_likelihood(only(logits_1TV), jnp.roll(tokens_1T, -1, 1))
            return -log_p_1T.mean(where=(jnp.arange(T) < length - 1)[None])

        heads = tuple(layer_names(config, "attn.head_out"))
        zeros = (jnp.zeros((1, T, config.n_head, config.head_width), model.ops.dtype),) * config.n_layer
        clean, ablated_LN = sweep(model, params, tokens_1T, zeros, heads, 2, loss)
        without_LN = ablated_LN - clean
    return _Computed(
        jax.nn.log_softmax(only(out.logits)[0]),
        jnp.stack([out.taps[name][0] for name in stream]),
        jnp.stack([out.taps[name][0] for name in patterns]),
        layers.ids[:, 0, :, 0],
        layers.probabilities[:, 0, :, 0],
        without_LN,
    )


def html(inspection: Inspection, title: str) -> str:
    """Return an inspection as a self-contained HTML page.

    `title` is the heading, such as the name of the model.
    """
    template, style, script = (
        files("jaxgpt.study").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    L, N, T, _ = inspection.attention.shape
    made = f", {T - inspection.prompt} generated greedily (underlined)" if inspection.prompt < T else ""
    model = f"{inspection.source}: " * bool(inspection.source) + f"{plural(L, 'layer')} of {plural(N, 'head')}"
    row, column = np.tril_indices(T)  # lower triangle: the stored entries of the attention maps
    weights = np.rint(255 * inspection.attention[:, :, row, column]).astype(np.uint8)
    # The template escapes all text of the model and the user.
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


def token_text(tokenizer: Tokenizer, i: int, first: int | None = None) -> str:
    """Return the text of a token, or the names of its bytes if they are not complete characters.

    With `first`, the token is decoded after this id, because some decoders strip a leading space.
    """
    text = tokenizer.decode([i])
    if first is not None and not tokenizer.separator:
        before, both = tokenizer.decode([first]), tokenizer.decode([first, i])
        text = both[len(before) :] if both.startswith(before) else text
    return tokenizer.name(i) if UNFINISHED in text else text


def visible(text: str, space: str = " ") -> str:
    """Make line breaks, tabs and unprintable characters visible, and replace spaces with `space`.

    Bidirectional control characters count as unprintable, because they could rearrange the page.
    """
    special = SPACES | {" ": space}
    return "".join(special.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
