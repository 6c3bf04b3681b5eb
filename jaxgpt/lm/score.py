"""Score given texts: the log probability of each token of a continuation."""

from __future__ import annotations

import math
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
from jaxgpt.train.loss import chunked, log_likelihood

# Default number of positions of a batch, by platform; larger batches exceed the caches of CPUs, and are slower there.
SCORE_TOKENS = {"cpu": 1 << 9}
ACCELERATOR_TOKENS = 1 << 13  # on other platforms
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
    def inputs(self) -> list[int]:
        """The ids that the model reads: all except the last."""
        return (self.context + self.ids)[:-1]


class _Row(NamedTuple):
    """Ids that the model reads once, for all texts whose inputs they begin with.

    Attributes:
        inputs: ids that the model reads.
        texts: indices of the texts.
    """

    inputs: list[int]
    texts: list[int]


def score(
    lm: LM,
    contexts: Prompts,
    continuations: Prompts,
    *,
    batch_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Compute the log probability of each token of each continuation, given its context and the tokens before it.

    Except for rounding, the results equal `Generation.log_p` of the same tokens. Texts are batched by length, and inputs
    that begin a different text, such as the same question before answers of one token, are computed once, with that text.
    Memory holds the activations of `batch_tokens` positions and the logits of a part of them. Weights on a mesh remain on
    their devices.

    Args:
        lm: model.
        contexts: a string or ids, or a list of them; an empty string is the beginning of a text.
        continuations: one for each context, a string or ids. A string continues the text of the context and has the same
            ids as in the joined text, unless a token of the joined text crosses the boundary.
        batch_tokens: maximum number of positions of a batch, at least one text; None: 512 on CPUs, otherwise 8,192.
        progress: callback with the number of scored texts so far, and the total; its exceptions end the computation.

    Raises:
        UserError: if the numbers of contexts and continuations differ, a continuation has no tokens, or (without RoPE) a text
            exceeds the context length of the model.
    """
    lm = for_decoding(lm)
    if batch_tokens is None:
        batch_tokens = SCORE_TOKENS.get(jax.local_devices()[0].platform, ACCELERATOR_TOKENS)
    batch_tokens = as_int("batch_tokens", batch_tokens, 1, INT_MAX)
    befores = as_prompts(contexts)
    afters = as_prompts(continuations)
    if len(befores) != len(afters):
        raise UserError(f"{len(befores)} contexts and {len(afters)} continuations: pass one continuation per context")
    texts = [_encode(lm, before, after) for before, after in zip(befores, afters, strict=True)]

    # Batches of similar lengths, the longest first. Sizes are rounded up, so that few shapes are compiled.
    rows = sorted(_shared_rows(texts), key=lambda row: -len(row.inputs))
    scores: dict[int, Score] = {}
    while rows:
        longest = len(rows[0].inputs)
        T = max(longest, min(_round_length(longest), lm.config.model.block_size))
        B = min(max(batch_tokens // T, 1), round_up(len(rows)))
        batch = rows[:B]
        rows = rows[B:]
        scores |= _score_batch(lm, texts, batch, B, T)
        if progress is not None:
            progress(len(scores), len(texts))
    return [scores[n] for n in range(len(texts))]


def _shared_rows(texts: list[_Text]) -> list[_Row]:
    """Return the rows that compute all texts; a text whose inputs begin those of a different text shares its row."""
    inputs = [text.inputs for text in texts]
    # In alphabetical order, the texts that begin with the inputs of a text follow it. From the last to the first:
    order = sorted(range(len(texts)), key=lambda n: inputs[n], reverse=True)
    rows: list[_Row] = []
    for n in order:
        is_shared = bool(rows) and rows[-1].inputs[: len(inputs[n])] == inputs[n]
        if is_shared:
            rows[-1].texts.append(n)
        else:
            rows.append(_Row(inputs[n], [n]))
    return rows


def _round_length(n: int) -> int:
    """Round a length up to a quarter of a power of two, at least 16: few shapes, and at most a quarter of padding."""
    step = max(round_up(n) // 8, 16)
    return math.ceil(n / step) * step


def _encode(lm: LM, before: Any, after: Any) -> _Text:
    """Encode a context and its continuation, and check their length."""
    model = lm.config.model
    given = encode_prompt(lm.tokenizer, model.vocab_size, before)
    context = given or start_ids(lm.tokenizer)
    ids = _continuation(lm, before, after)
    if not ids:
        raise UserError("a continuation has no tokens: pass a text or at least one id")
    text = _Text(context, ids)
    if len(text.inputs) > model.block_size and model.positions != "rope":
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


def _score_batch(lm: LM, texts: list[_Text], rows: list[_Row], B: int, T: int) -> dict[int, Score]:
    """Score the texts of up to B rows with at most T input tokens; keyed by index."""
    # The positions whose next token is a target: the head computes no other logits. A row of several texts has the targets
    # of all of them.
    counts = [sum(len(texts[n].ids) for n in row.texts) for row in rows]
    C = round_up(max(counts), 8)
    if max(counts) <= T < C:
        C = T
    tokens_BT = np.zeros((B, T), np.int32)
    at_BC = np.zeros((B, C), np.int32)
    targets_BC = np.full((B, C), -1, np.int32)
    places = dict[int, tuple[int, slice]]()
    for number, row in enumerate(rows):
        tokens_BT[number, : len(row.inputs)] = row.inputs
        begin = 0
        for n in row.texts:
            text = texts[n]
            end = begin + len(text.ids)
            first = len(text.context) - 1
            at_BC[number, begin:end] = np.arange(first, first + len(text.ids))
            targets_BC[number, begin:end] = text.ids
            places[n] = (number, slice(begin, end))
            begin = end

    # Padding is on the right, where a causal model needs no mask.
    compiled = _compiled(sampler_of(lm).model, max(CHUNK // B, 1))
    with placed(lm, B):
        log_p_BC, is_best_BC = jax.device_get(compiled(lm.params, tokens_BT, at_BC, targets_BC))
    return {n: Score(texts[n].ids, log_p_BC[place], is_best_BC[place]) for n, place in places.items()}


@lru_cache(maxsize=16)
def _compiled(model: GPT, chunk: int) -> Callable[..., Any]:
    """Return the jitted function `(params, tokens_BT, at_BC, targets_BC) -> (log_p_BC, is_best_BC)`."""

    def scores(params: Any, tokens_BT: jax.Array, at_BC: jax.Array, targets_BC: jax.Array) -> Any:
        x_BTD: Any = model.apply({"params": params}, tokens_BT, method=GPT.hidden)
        x_BCD = jnp.take_along_axis(x_BTD, at_BC[..., None], axis=1)

        def of_chunk(x_BcD: jax.Array, targets_Bc: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits_BcV: Any = model.apply({"params": params}, x_BcD, method=GPT.head)
            logits_BcV = logits_BcV.astype(jnp.float32)
            log_p_Bc = log_likelihood(logits_BcV, jnp.maximum(targets_Bc, 0))
            return log_p_Bc, jnp.argmax(logits_BcV, axis=-1) == targets_Bc

        return chunked(of_chunk, x_BCD, targets_BC, chunk)

    return jax.jit(scores)
