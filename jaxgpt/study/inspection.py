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
from jaxgpt.lm.sampler import OnlyIds, only_text
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
        begin = 1 if len(self.ids) > 1 else 0  # index of the first query in the means
        same = np.diagonal(self.attention, 0, 2, 3)
        previous = np.diagonal(self.attention, -1, 2, 3)
        entropies = np.asarray(entropy(jnp.asarray(self.attention)))
        values = {
            "same": same[..., begin:].mean(-1),
            "previous": previous.mean(-1) if begin else np.zeros(same.shape[:2]),
            "first": self.attention[:, :, begin:, 0].mean(-1),
            "entropy": entropies[..., begin:].mean(-1),
        }
        if self.without is not None:
            values["without"] = self.without

        rows = []
        for layer, head in np.ndindex(same.shape[:2]):
            row: dict[str, Any] = {"layer": layer, "head": head}
            row |= {name: float(value[layer, head]) for name, value in values.items()}
            rows.append(row)
        return rows

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
    model = lm.config.model
    only = only_text(lm)
    ids = encode_prompt(lm.tokenizer, model.vocab_size, prompt) or start_ids(lm.tokenizer)
    before = len(ids)
    limit = min(INSPECTED_TOKENS, model.block_size)
    if before + max_new_tokens > limit:
        raise UserError(
            f"a prompt of {before} tokens and {max_new_tokens} new tokens exceed the limit of {limit}: shorten the "
            f"prompt, or lower max_new_tokens"
        )
    if max_new_tokens:
        [continuation] = generate(lm, [ids], max_new_tokens=max_new_tokens, temperature=0)
        ids = ids + continuation.ids
    T = len(ids)

    # Pad the text to a power of two, within the limit: texts of similar lengths then share a compiled program.
    size = min(limit, round_up(T, 8))
    padded = np.pad([ids], ((0, 0), (0, size - T)))
    flops = 2 * count_parameters(lm.gpt) * T * model.n_layer * model.n_head  # FLOPs of ablating each head in turn
    ablate = T > 1 and flops <= ABLATION
    found = jax.device_get(on_tokens(_compute, lm, padded, np.int32(T), only, ablate))
    log_p_TV = found.log_p_TV[:T]
    if np.isnan(log_p_TV).any():
        raise UserError(DIVERGED)

    p_TV = np.exp(log_p_TV)
    k = min(TOP, int(np.isfinite(log_p_TV[0]).sum()))  # ids without a text have probability 0
    best_Tk = np.argsort(-log_p_TV, axis=-1, kind="stable")[:, :k]
    next_log_p = log_p_TV[np.arange(T - 1), ids[1:]]

    word = partial(token_text, lm.tokenizer, first=ids[0])
    return Inspection(
        source=lm.source,
        ids=ids,
        tokens=[token_text(lm.tokenizer, ids[0]), *map(word, ids[1:])],
        prompt=before,
        top_ids=best_Tk,
        top_probabilities=np.take_along_axis(p_TV, best_Tk, -1),
        top_tokens=[[word(i) for i in row] for row in best_Tk.tolist()],
        entropy=-(p_TV * np.where(p_TV > 0, log_p_TV, 0.0)).sum(-1),
        next_probability=np.exp(next_log_p),
        next_rank=1 + (log_p_TV[:-1] > next_log_p[:, None]).sum(-1),
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
            has_next_T = jnp.arange(T) < length - 1
            return -log_p_1T.mean(where=has_next_T[None])

        heads = tuple(layer_names(config, "attn.head_out"))
        zeros_1TNH = jnp.zeros((1, T, config.n_head, config.head_width), model.ops.dtype)
        clean, ablated_LN = sweep(model, params, tokens_1T, (zeros_1TNH,) * config.n_layer, heads, 2, loss)
        without_LN = ablated_LN - clean

    return _Computed(
        log_p_TV=jax.nn.log_softmax(only(out.logits)[0]),
        stream_LTD=jnp.stack([out.taps[name][0] for name in stream]),
        attention_LNTT=jnp.stack([out.taps[name][0] for name in patterns]),
        lens_LT=layers.ids[:, 0, :, 0],
        lens_p_LT=layers.probabilities[:, 0, :, 0],
        without_LN=without_LN,
    )


def html(inspection: Inspection, title: str) -> str:
    """Return an inspection as a self-contained HTML page.

    `title` is the heading, such as the name of the model.
    """
    folder = files("jaxgpt.study")
    template = folder.joinpath("page.html").read_text("utf-8")
    style = folder.joinpath("page.css").read_text("utf-8")
    script = folder.joinpath("page.js").read_text("utf-8")

    # The policy allows inline styles and the script with this digest, and nothing else.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    script_rule = f"script-src 'sha256-{digest}'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; {script_rule}; base-uri 'none'; form-action 'none'"

    L, N, T, _ = inspection.attention.shape
    summary = f"{plural(L, 'layer')} of {plural(N, 'head')}. {plural(T, 'token')}: {inspection.prompt} of the prompt"
    if inspection.source:
        summary = f"{inspection.source}: {summary}"
    if inspection.prompt < T:
        summary += f", {T - inspection.prompt} generated greedily (underlined)"

    # The page stores the lower triangle of the attention maps, one byte per weight.
    row, column = np.tril_indices(T)
    weights = np.rint(255 * inspection.attention[:, :, row, column]).astype(np.uint8)

    # The template escapes all text of the model and the user.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["visible"] = visible
    return environment.from_string(template).render(
        found=inspection,
        title=title,
        summary=f"{summary}.",
        largest=inspection.norms.max() or 1.0,
        data={
            "tokens": [visible(token, DOT) for token in inspection.tokens],
            "layers": L,
            "heads": N,
            "weights": base64.b64encode(weights.tobytes()).decode(),
        },
        policy=policy,
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
        before = tokenizer.decode([first])
        both = tokenizer.decode([first, i])
        if both.startswith(before):
            text = both[len(before) :]
    return tokenizer.name(i) if UNFINISHED in text else text


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
