"""Score given texts: the log probability of each token of a continuation."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.data.tokenizer import encode_continuation
from jaxgpt.errors import UserError
from jaxgpt.lm.arguments import Prompts, as_prompts, encode_prompt, start_ids
from jaxgpt.lm.engine import round_up
from jaxgpt.lm.model import LM
from jaxgpt.lm.placement import placed
from jaxgpt.lm.sampler import for_decoding, sampler_of
from jaxgpt.model import GPT
from jaxgpt.settings import INT_MAX, as_int
from jaxgpt.train.loss import chunked, log_likelihood, split_windows

SCORE_TOKENS = 1 << 13  # default number of positions of a batch
CHUNK = 1 << 10  # positions of a batch whose logits are in memory at once: 0.2 GB with 50,257 ids


class Score(NamedTuple):
    """The log probability of a continuation.

    Attributes:
        ids: ids of the continuation.
        log_p: log probability of each id, in nats, float32 `[n]`; their sum is the log probability of the continuation.
        is_best: whether each id is the most probable at its position, which greedy decoding would choose, bool `[n]`.
    """

    ids: list[int]
    log_p: np.ndarray
    is_best: np.ndarray


class _Text(NamedTuple):
    """The ids of a context and of its continuation."""

    context: list[int]
    ids: list[int]

    @property
    def inputs(self) -> int:
        """Number of ids that the model reads: all except the last."""
        return len(self.context) + len(self.ids) - 1


def score(lm: LM, contexts: Prompts, continuations: Prompts, *, batch_tokens: int = SCORE_TOKENS) -> list[Score]:
    """Compute the log probability of each token of each continuation, given its context and the tokens before it.

    Except for rounding, the results equal `Generation.log_p` of the same tokens. Texts are batched by length. Memory holds the
    activations of `batch_tokens` positions and the logits of a part of them. Weights on a mesh remain on their devices.

    Args:
        lm: model.
        contexts: a string or ids, or a list of them; an empty string is the beginning of a text.
        continuations: one for each context, a string or ids. A string continues the text of the context and has the same
            ids as in the joined text, unless a token of the joined text crosses the boundary.
        batch_tokens: maximum number of positions of a batch, at least one text.

    Raises:
        UserError: if the numbers of contexts and continuations differ, a continuation has no tokens, or (without RoPE) a text
            exceeds the context length of the model.
    """
    lm = for_decoding(lm)
    batch_tokens = as_int("batch_tokens", batch_tokens, 1, INT_MAX)
    befores = as_prompts(contexts)
    afters = as_prompts(continuations)
    if len(befores) != len(afters):
        raise UserError(f"{len(befores)} contexts and {len(afters)} continuations: pass one continuation per context")
    texts = [_encode(lm, before, after) for before, after in zip(befores, afters, strict=True)]

    # Batches of similar lengths, the longest first. Sizes are rounded up, so that few shapes are compiled.
    order = sorted(range(len(texts)), key=lambda n: -texts[n].inputs)
    scores: dict[int, Score] = {}
    while order:
        longest = texts[order[0]].inputs
        T = max(longest, min(round_up(longest, 16), lm.config.model.block_size))
        rows = max(batch_tokens // T, 1)
        batch, order = order[:rows], order[rows:]
        found = _score_batch(lm, [texts[n] for n in batch], T)
        scores |= dict(zip(batch, found, strict=True))
    return [scores[n] for n in range(len(texts))]


def _encode(lm: LM, before: Any, after: Any) -> _Text:
    """Encode a context and its continuation, and check their length."""
    model = lm.config.model
    given = encode_prompt(lm.tokenizer, model.vocab_size, before)
    context = given or start_ids(lm.tokenizer)
    ids = _continuation(lm, before, after)
    if not ids:
        raise UserError("a continuation has no tokens: pass a text or at least one id")
    text = _Text(context, ids)
    if text.inputs > model.block_size and model.positions != "rope":
        raise UserError(
            f"a text has {len(context)} tokens of context and {len(ids)} of continuation, and the model reads at most "
            f"{model.block_size}: shorten the context"
        )
    return text


def _continuation(lm: LM, before: Any, after: Any) -> list[int]:
    """Encode a continuation; a string continues the text of the context."""
    size = lm.config.model.vocab_size
    if not isinstance(after, str):
        return encode_prompt(lm.tokenizer, size, after)
    ids = encode_continuation(lm.tokenizer, before, after).tolist()
    return encode_prompt(lm.tokenizer, size, ids) if ids else []


def _score_batch(lm: LM, texts: list[_Text], T: int) -> list[Score]:
    """Score texts whose inputs have at most T tokens."""
    # Only the tokens of continuations are targets, not the rows and positions that fill the batch.
    windows_BT3 = np.full((round_up(len(texts)), T, 3), (0, -1, -1), np.int32)
    for row_T3, text in zip(windows_BT3, texts, strict=False):
        row_T3[: text.inputs, 0] = (text.context + text.ids)[:-1]
        row_T3[len(text.context) - 1 : text.inputs, 1] = text.ids
        row_T3[: text.inputs, 2] = 0

    model = sampler_of(lm).model
    compiled = _compiled(model, max(CHUNK // len(windows_BT3), 1))
    with placed(lm, len(windows_BT3)):
        log_p_BT, is_best_BT = jax.device_get(compiled(lm.params, windows_BT3))

    scores = []
    for row, text in enumerate(texts):
        continuation = slice(len(text.context) - 1, text.inputs)
        scores.append(Score(text.ids, log_p_BT[row, continuation], is_best_BT[row, continuation]))
    return scores


@lru_cache(maxsize=16)
def _compiled(model: GPT, chunk: int) -> Callable[..., Any]:
    """Return the jitted function `(params, windows_BT3) -> (log_p_BT, is_best_BT)`."""

    def scores(params: Any, windows_BT3: jax.Array) -> Any:
        inputs_BT, targets_BT, positions = split_windows(windows_BT3)
        x_BTD: Any = model.apply({"params": params}, inputs_BT, None, positions, method=GPT.hidden)

        def of_chunk(x_BcD: jax.Array, targets_Bc: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits_BcV: Any = model.apply({"params": params}, x_BcD, method=GPT.head)
            logits_BcV = logits_BcV.astype(jnp.float32)
            log_p_Bc = log_likelihood(logits_BcV, jnp.maximum(targets_Bc, 0))
            return log_p_Bc, jnp.argmax(logits_BcV, axis=-1) == targets_Bc

        return chunked(of_chunk, x_BTD, targets_BT, chunk)

    return jax.jit(scores)
