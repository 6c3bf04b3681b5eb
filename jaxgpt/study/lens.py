"""The logit lens: the residual stream of each layer, read as logits (nostalgebraist 2020)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.lm import LM
from jaxgpt.lm.sampler import OnlyIds, only_text
from jaxgpt.model import GPT
from jaxgpt.settings import as_int
from jaxgpt.study.activation_names import stream_names
from jaxgpt.study.observer import forward, replace_with
from jaxgpt.study.token_ids import as_tokens, on_tokens

UNKNOWN = -1  # answer of the logit lens before the last block's output is read; ids are at least 0


class Lens(NamedTuple):
    """The logit lens: the next token as predicted from each layer's residual stream.

    Layer l is the input of block l; layer L is the output of the last block, which gives the model's prediction.

    Attributes:
        ids: the k most probable tokens, `[L + 1, B, T, k]`.
        probabilities: probabilities of `ids`, `[L + 1, B, T, k]`.
        answer: the model's most probable token, `[B, T]`.
        rank: rank of the answer, 1 for the most probable token, `[L + 1, B, T]`.
        first: the first layer at which the answer is the most probable token, `[B, T]`.
    """

    ids: jax.Array
    probabilities: jax.Array
    answer: jax.Array
    rank: jax.Array
    first: jax.Array


def lens(lm: LM, ids: Any, k: int = 5) -> Lens:
    """Apply the final norm and the head to the input of each block and to the output of the last block.

    Ids without a text have probability 0, as in generation.

    Args:
        ids: a text, or ids `[B, T]`.
        k: number of most probable tokens to return.

    Raises:
        UserError: as in `run`, or if k is not between 1 and the vocabulary size.
    """
    tokens_BT = as_tokens(lm, ids)
    k = as_int("k", k, 1, lm.config.model.vocab_size)
    return on_tokens(_jitted_lens, lm, tokens_BT, k, only_text(lm))


def compute_lens(model: GPT, params: Any, tokens_BT: jax.Array, k: int, only: OnlyIds) -> Lens:
    """Compute `lens` of checked ids within a jitted function."""
    names = tuple(stream_names(model.config))
    last = names[-1]
    out = forward(model, params, tokens_BT, names)

    # The scan reads the last block's output first: its most probable tokens are the answer, which the other layers rank. The
    # program is the same for all layers: in bfloat16, a different program may return a different answer.
    def read(answer_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        # The blocks before the edit do not affect the logits, so the compiler removes them.
        logits_BTV = forward(model, params, tokens_BT, (), ((last, replace_with(x_BTD)),)).logits
        logits_BTV = only(logits_BTV)
        _, ids_BTk = jax.lax.top_k(logits_BTV, k)
        answer_BT = jnp.where(answer_BT == UNKNOWN, ids_BTk[..., 0], answer_BT)
        answer_BT1 = jnp.take_along_axis(logits_BTV, answer_BT[..., None], -1)
        probability_BTk = jnp.take_along_axis(jax.nn.softmax(logits_BTV), ids_BTk, -1)
        rank_BT = 1 + (logits_BTV > answer_BT1).sum(-1)
        return answer_BT, (ids_BTk, probability_BTk, rank_BT)

    unknown_BT = jnp.full(tokens_BT.shape, UNKNOWN, jnp.int32)
    stream = jnp.stack([out.taps[name] for name in names])
    answer_BT, (ids, probabilities, rank) = jax.lax.scan(read, unknown_BT, stream, reverse=True)
    first_BT = jnp.argmax(rank == 1, 0)
    return Lens(ids, probabilities, answer_BT, rank, first_BT)


_jitted_lens = jax.jit(compute_lens, static_argnums=(0, 3, 4))
