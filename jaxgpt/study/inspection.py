"""Inspect a model on one text: predictions, attention, the logit lens and norms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import SEED
from jaxgpt.data import Tokenizer
from jaxgpt.decoding.sampling import DIVERGED
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, generate
from jaxgpt.lm.arguments import encode_prompt
from jaxgpt.lm.model import ids_with_text, only_text
from jaxgpt.lm.text import UNFINISHED
from jaxgpt.study.heads import entropy
from jaxgpt.study.interventions import ablate_heads
from jaxgpt.study.lens import lens
from jaxgpt.study.run import layer_names, run, stream_names

INSPECTED_TOKENS = 128  # tokens of an inspected text
TOP = 5  # most probable tokens at each position
ABLATION = 10**12  # FLOPs of running the model without each head: about a minute on two cores


@dataclass(frozen=True)
class TextLoss:
    """The mean loss of a text of given ids, as a function of the logits `[1, T, V]`.

    Attributes:
        ids: ids of the text.
        has_text: ids with a text, as `ids_with_text` returns them; the others have probability 0, as in generation.
    """

    ids: tuple[int, ...]
    has_text: bytes = b""

    def __call__(self, logits_BTV: jax.Array) -> jax.Array:
        """Compute the cross entropy in nats per token."""
        log_p_TV = jax.nn.log_softmax(only_text(logits_BTV, self.has_text)[0, :-1])
        return -jnp.take_along_axis(log_p_TV, jnp.asarray(self.ids[1:])[:, None], -1).mean()


class Inspection(NamedTuple):
    """The predictions and activations of a model for a text of T tokens.

    Attributes:
        source: run and step of the model, as `LM.source`.
        generated: method that generated the tokens after the prompt: greedy, or temperature and seed; "": the prompt alone.
        ids: ids of the text, `[T]`.
        tokens: their texts.
        prompt: number of tokens of the prompt; the others are generated.
        top_ids: the most probable next tokens after each token, `[T, k]`.
        top_probabilities: their probabilities, `[T, k]`.
        top_tokens: their texts, `[T][k]`.
        entropy: entropy of the next token after each token, in nats, `[T]`.
        next_probability: probability of the token that follows each token but the last, `[T - 1]`.
        next_rank: its rank, 1 for the most probable token, `[T - 1]`.
        attention: `[L, N, T, T]`.
        lens_tokens: the most probable next token as read from the input of each block, and from the output of the last one,
            `[L + 1][T]`.
        lens_probabilities: their probabilities, `[L + 1, T]`.
        norms: Euclidean norms of the same vectors, `[L + 1, T]`.
        without: increase of the loss of the text without each head, in nats per token, `[L, N]`; None: not computed, as
            the model is too large, or the text is one token, which has no loss.
    """

    source: str
    generated: str
    ids: list[int]
    tokens: list[str]
    prompt: int
    top_ids: np.ndarray
    top_probabilities: np.ndarray
    top_tokens: list[list[str]]
    entropy: np.ndarray
    next_probability: np.ndarray
    next_rank: np.ndarray
    attention: np.ndarray
    lens_tokens: list[list[str]]
    lens_probabilities: np.ndarray
    norms: np.ndarray
    without: np.ndarray | None

    def heads(self) -> list[dict[str, Any]]:
        """Summarize each head: mean attention to the token itself, the previous and the first token, and entropy.

        The means are over all tokens but the first; attention to the first token includes the second token's. `without`, if
        measured, is the increase of the text's loss without the head.
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


def inspect(
    lm: LM,
    prompt: str,
    *,
    max_new_tokens: int = 20,
    temperature: float = 0.0,
    key: int = SEED,
    longest: int = INSPECTED_TOKENS,
) -> Inspection:
    """Continue a prompt, and inspect the whole text in one forward pass.

    Args:
        lm: the model.
        prompt: the text to continue; empty: start a new text.
        max_new_tokens: maximum number of new tokens; 0: inspect the prompt alone.
        temperature: as for `generate`.
        key: a seed.
        longest: maximum number of tokens of the text.

    Raises:
        UserError: as `generate`, the text is longer than `longest` or the context length, or the weights have diverged.
    """
    model = lm.config.model
    ids = encode_prompt(lm.tokenizer, model.vocab_size, prompt).ids
    limit, before = min(longest, model.block_size), len(ids)
    if before + max_new_tokens > limit:
        raise UserError(
            f"a prompt of {before} tokens and {max_new_tokens} new tokens exceed the limit of {limit}: shorten the "
            f"prompt, or lower max-new-tokens"
        )
    generated = ""
    if max_new_tokens:
        ids = ids + generate(lm, [ids], max_new_tokens=max_new_tokens, temperature=temperature, key=key)[0].ids
        generated = f"at temperature {temperature:g}, seed {key}" if temperature else "greedy"
    stream, patterns = stream_names(model), layer_names(model, "attn.pattern")
    out = run(lm, [ids], [*stream, *patterns])
    has_text = ids_with_text(lm)
    logits = np.asarray(only_text(out.logits, has_text)[0], np.float64)
    top = logits.max(-1, keepdims=True)
    if not np.isfinite(top).all():
        raise UserError(DIVERGED)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    p = np.exp(log_p)
    k = min(TOP, int(np.isfinite(log_p[0]).sum()))
    best = np.argsort(-log_p, axis=-1, kind="stable")[:, :k]
    follows = np.take_along_axis(log_p[:-1], np.array(ids[1:], np.int64)[:, None], -1)
    layers = lens(lm, [ids], 1)
    without = None
    if len(ids) > 1 and 2 * model.parameters * len(ids) * model.n_layer * model.n_head <= ABLATION:
        removed = ablate_heads(lm, [ids], TextLoss(tuple(ids), has_text))
        without = np.asarray(removed.ablated) - float(removed.clean)

    word = partial(token_text, lm.tokenizer, first=ids[0])
    return Inspection(
        source=lm.source,
        generated=generated,
        ids=ids,
        tokens=[token_text(lm.tokenizer, ids[0]), *map(word, ids[1:])],
        prompt=before,
        top_ids=best,
        top_probabilities=np.take_along_axis(p, best, -1),
        top_tokens=[[word(i) for i in row] for row in best.tolist()],
        entropy=-(p * np.where(p > 0, log_p, 0.0)).sum(-1),
        next_probability=np.exp(follows[:, 0]),
        next_rank=1 + (log_p[:-1] > follows).sum(-1),
        attention=np.stack([np.asarray(out.taps[name][0], np.float32) for name in patterns]),
        lens_tokens=[[word(i) for i in row] for row in layers.ids[:, 0, :, 0].tolist()],
        lens_probabilities=np.asarray(layers.probabilities)[:, 0, :, 0],
        norms=np.stack([np.linalg.norm(np.asarray(out.taps[name][0], np.float64), axis=-1) for name in stream]),
        without=without,
    )


def token_text(tokenizer: Tokenizer, i: int, first: int | None = None) -> str:
    """Return the text of a token; the name of its bytes if they are not whole characters.

    With a first token before it: some decoders drop the space that begins a text.
    """
    text = tokenizer.decode([i])
    if first is not None and not tokenizer.separator:
        before, both = tokenizer.decode([first]), tokenizer.decode([first, i])
        text = both[len(before) :] if both.startswith(before) else text
    return tokenizer.name(i) if UNFINISHED in text else text
