"""Score given texts: the log probability of each token of a continuation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.data.tokenizers.continuation import encode_continuation
from jaxgpt.errors import UserError
from jaxgpt.lm.arguments import Prompts, as_prompts, encode_prompt, start_ids
from jaxgpt.lm.buffers import round_up
from jaxgpt.lm.model import LM
from jaxgpt.lm.placement import row_ways
from jaxgpt.lm.sampler import for_decoding
from jaxgpt.lm.score_batch import ContinuedText, compute_batch, pack, round_length, sizes
from jaxgpt.lm.tree import Tree, shared_rows
from jaxgpt.model import GPT
from jaxgpt.settings import INT_MAX, as_int

# Maximum number of positions of texts that share a row: the number of attention scores grows with the square of this number.
ROW_TOKENS = 1 << 11


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


def score(
    lm: LM,
    contexts: Prompts,
    continuations: Prompts,
    *,
    batch_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Compute the log probability of each token of each continuation, given its context and the tokens before it.

    Except for rounding, the results equal `Generation.log_p` of the same tokens. Texts are batched by length. A common
    beginning of several texts, such as a question before its answers, is computed once if this saves time. Memory holds the
    activations of `batch_tokens` positions and the logits of a part of them. Weights on a mesh remain on their devices.

    Args:
        lm: model.
        contexts: a string or ids, or a list of them; an empty string is the beginning of a text.
        continuations: one for each context, a string or ids. A string continues the text of the context and has the same
            ids as in the joined text, unless a token of the joined text crosses the boundary.
        batch_tokens: maximum number of positions of a batch. A batch has at least one row: one text, or texts with a
            common beginning in up to 2,048 positions. None: 512 on CPUs, otherwise 8,192. On a mesh, a number of rows
            above one is then rounded up to a multiple of the number of devices that divide the rows.
        progress: callback with the number of scored texts so far, and the total; its exceptions end the computation.

    Raises:
        UserError: if the numbers of contexts and continuations differ, a continuation has no tokens, or (without RoPE) a text
            exceeds the context length of the model.
    """
    lm = for_decoding(lm)
    if batch_tokens is None:
        batch_tokens = sizes().batch_tokens
    batch_tokens = as_int("batch_tokens", batch_tokens, 1, INT_MAX)
    contexts = as_prompts(contexts)
    continuations = as_prompts(continuations)
    if len(contexts) != len(continuations):
        raise UserError(
            f"{len(contexts)} contexts and {len(continuations)} continuations: pass one continuation per context"
        )
    pairs = zip(contexts, continuations, strict=True)
    texts = [_encode(lm, context, continuation) for context, continuation in pairs]

    # Batch rows of similar lengths, the longest first. Sizes are rounded up, so that few shapes are compiled.
    ways = row_ways(lm)
    rows = sorted(_rows_of(lm, texts), key=lambda row: -len(row.ids))
    scores: dict[int, Score] = {}
    while rows:
        B, T = _batch_shape(rows, batch_tokens, ways, lm.config.model.block_size)
        batch = pack(texts, rows[:B], B, T)
        rows = rows[B:]
        log_p_BC, is_best_BC = compute_batch(lm, batch)
        for n, place in batch.places.items():
            scores[n] = Score(texts[n].ids, log_p_BC[place], is_best_BC[place])
        if progress is not None:
            progress(len(scores), len(texts))
    return [scores[n] for n in range(len(texts))]


def _batch_shape(rows: list[Tree], batch_tokens: int, ways: int, block_size: int) -> tuple[int, int]:
    """Return the number and the length of the rows of the next batch, `B, T`.

    Args:
        rows: the remaining rows, the longest first.
        batch_tokens: maximum number of positions, before rounding.
        ways: number of devices that divide the rows of a batch.
        block_size: context length of the model.
    """
    longest = len(rows[0].ids)
    T = round_length(longest)
    if longest <= block_size:
        T = min(T, block_size)
    B = min(max(batch_tokens // T, 1), round_up(len(rows)))
    if B > 1:
        B = math.ceil(B / ways) * ways
    return B, T


def _rows_of(lm: LM, texts: list[ContinuedText]) -> list[Tree]:
    """Return the rows that compute all texts; texts with a common beginning share a row if that is less work."""
    # A subclass of GPT may attend in its own way, and learned positions limit the length of a row.
    may_branch = lm.model is GPT
    model = lm.config.model
    longest = min(model.block_size, ROW_TOKENS) if model.positions == "learned" else ROW_TOKENS
    return shared_rows([text.inputs for text in texts], longest, may_branch)


def _encode(lm: LM, context: Any, continuation: Any) -> ContinuedText:
    """Encode a context and its continuation, each a string or ids, and check their length."""
    model = lm.config.model
    context_ids = encode_prompt(lm.tokenizer, model.vocab_size, context) or start_ids(lm.tokenizer)
    ids = _encode_continuation(lm, context, continuation)
    if not ids:
        raise UserError("a continuation has no tokens: pass a text or at least one id")
    text = ContinuedText(context_ids, ids)
    if len(text.inputs) > model.block_size and model.positions != "rope":
        raise UserError(
            f"a text has {len(context_ids)} tokens of context and {len(ids)} of continuation, and the model reads at most "
            f"{model.block_size}: shorten the context"
        )
    return text


def _encode_continuation(lm: LM, context: Any, continuation: Any) -> list[int]:
    """Encode a continuation; a string continues the text of the context."""
    vocab_size = lm.config.model.vocab_size
    if not isinstance(continuation, str):
        return encode_prompt(lm.tokenizer, vocab_size, continuation)
    ids = encode_continuation(lm.tokenizer, context, continuation).tolist()
    return encode_prompt(lm.tokenizer, vocab_size, ids) if ids else []
