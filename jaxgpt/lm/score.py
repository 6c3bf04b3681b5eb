"""Score given texts: the log probability of each token of a continuation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.data.tokenizers.continuation import encode_continuation
from jaxgpt.errors import UserError
from jaxgpt.lm.arguments import Prompts, as_prompts, encode_prompt, start_ids
from jaxgpt.lm.engine import round_up
from jaxgpt.lm.model import LM
from jaxgpt.lm.placement import block_on_mesh, row_ways, use_mesh_of
from jaxgpt.lm.sampler import for_decoding, sampler_of
from jaxgpt.lm.tree import Tree, attend_to_ancestors
from jaxgpt.model import GPT
from jaxgpt.ops.attention import Positions
from jaxgpt.parallel.arrays import to_host
from jaxgpt.settings import INT_MAX, as_int
from jaxgpt.train.at_positions import chunked


class Sizes(NamedTuple):
    """Numbers of positions that are computed at a time.

    Attributes:
        batch_tokens: default number of positions of a batch.
        head_positions: number of positions with logits in memory.
    """

    batch_tokens: int
    head_positions: int


# Larger batches exceed the caches of CPUs, and are slower there. 128 rows of 49,152 logits (25 MB) are a block that malloc
# reuses; larger blocks are mapped again for every batch.
ON_CPU = Sizes(batch_tokens=1 << 9, head_positions=1 << 7)
ON_ACCELERATOR = Sizes(batch_tokens=1 << 13, head_positions=1 << 10)  # 1,024 rows of 50,257 logits take 0.2 GB
ROW_TOKENS = 1 << 11  # maximum positions of texts that share a row: attention scores grow with its square
BREAK_EVEN = 1 << 9  # lower bound on the number of scores that cost as much as the other work of a position


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


def score(
    lm: LM,
    contexts: Prompts,
    continuations: Prompts,
    *,
    batch_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Compute the log probability of each token of each continuation, given its context and the tokens before it.

    Except for rounding, the results equal `Generation.log_p` of the same tokens. Texts are batched by length, and a common
    beginning of several texts, such as a question before its answers, is computed once. Memory holds the activations of
    `batch_tokens` positions and the logits of a part of them. Weights on a mesh remain on their devices.

    Args:
        lm: model.
        contexts: a string or ids, or a list of them; an empty string is the beginning of a text.
        continuations: one for each context, a string or ids. A string continues the text of the context and has the same
            ids as in the joined text, unless a token of the joined text crosses the boundary.
        batch_tokens: maximum number of positions of a batch. A batch has at least one row: one text, or texts with a
            common beginning in up to 2,048 positions. None: 512 on CPUs, otherwise 8,192. On a mesh, the number of rows
            is then rounded up to a multiple of the devices that divide them.
        progress: callback with the number of scored texts so far, and the total; its exceptions end the computation.

    Raises:
        UserError: if the numbers of contexts and continuations differ, a continuation has no tokens, or (without RoPE) a text
            exceeds the context length of the model.
    """
    lm = for_decoding(lm)
    if batch_tokens is None:
        batch_tokens = _sizes().batch_tokens
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
    rows = sorted(_shared_rows(lm, texts), key=lambda row: -len(row.ids))
    scores: dict[int, Score] = {}
    while rows:
        B, T = _batch_shape(rows, batch_tokens, ways, lm.config.model.block_size)
        batch = rows[:B]
        rows = rows[B:]
        scores |= _score_batch(lm, texts, batch, B, T)
        if progress is not None:
            progress(len(scores), len(texts))
    return [scores[n] for n in range(len(texts))]


def _sizes() -> Sizes:
    """Return the sizes for the platform of the first device."""
    return ON_CPU if jax.local_devices()[0].platform == "cpu" else ON_ACCELERATOR


def _batch_shape(rows: list[Tree], batch_tokens: int, ways: int, block_size: int) -> tuple[int, int]:
    """Return the number and the length of the rows of the next batch, `B, T`.

    Args:
        rows: the remaining rows, the longest first.
        batch_tokens: maximum number of positions, before rounding.
        ways: number of devices that divide the rows of a batch.
        block_size: context length of the model.
    """
    longest = len(rows[0].ids)
    T = _round_length(longest)
    if longest <= block_size:
        T = min(T, block_size)
    B = min(max(batch_tokens // T, 1), round_up(len(rows)))
    if B > 1:
        B = math.ceil(B / ways) * ways
    return B, T


def _shared_rows(lm: LM, texts: list[_Text]) -> list[Tree]:
    """Return the rows that compute all texts; neighbors in the order of their ids share a row if that is less work."""
    # A subclass of GPT may attend in its own way, and learned positions limit the length of a row.
    may_branch = lm.model is GPT
    model = lm.config.model
    longest = min(model.block_size, ROW_TOKENS) if model.positions == "learned" else ROW_TOKENS

    inputs = [text.inputs for text in texts]
    order = sorted(range(len(texts)), key=lambda n: inputs[n])
    rows: list[Tree] = []
    for n in order:
        if rows and _joins(rows[-1], inputs[n], longest, may_branch):
            rows[-1].add(n, inputs[n])
        else:
            rows.append(Tree(n, inputs[n]))
    return rows


def _joins(row: Tree, inputs: list[int], longest: int, may_branch: bool) -> bool:
    """Return whether to add a text to the row of the previous text in the order of their ids."""
    common = row.common(inputs)
    before = len(row.ids)
    after = before + len(inputs) - common
    is_whole = common in (before, len(inputs))  # one text is the beginning of the other: nothing is computed twice
    if is_whole or not may_branch:
        return is_whole
    more_scores = after**2 - before**2 - len(inputs) ** 2
    return after <= longest and more_scores <= common * BREAK_EVEN


def _round_length(n: int, least: int = 16) -> int:
    """Round a length up, so that few shapes occur, to a multiple of `least` or of 1/8 of the next power of two."""
    step = max(round_up(n) // 8, least)
    return math.ceil(n / step) * step


def _encode(lm: LM, context: Any, continuation: Any) -> _Text:
    """Encode a context and its continuation, each a string or ids, and check their length."""
    model = lm.config.model
    context_ids = encode_prompt(lm.tokenizer, model.vocab_size, context) or start_ids(lm.tokenizer)
    ids = _encode_continuation(lm, context, continuation)
    if not ids:
        raise UserError("a continuation has no tokens: pass a text or at least one id")
    text = _Text(context_ids, ids)
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


class _Branches(NamedTuple):
    """The nodes of rows that are trees: position in the texts, and node after the last descendant."""

    position_BT: jax.Array | np.ndarray
    end_BT: jax.Array | np.ndarray


class _Batch(NamedTuple):
    """Rows of texts, padded on the right, where a causal model needs no mask.

    Attributes:
        tokens_BT: id of each node.
        position_BT: position of each node in its texts.
        end_BT: node after the last descendant of each node.
        at_BC: the nodes that predict the targets; the head computes logits only there.
        targets_BC: these targets; -1: padding.
        places: row and columns of the targets of each text, keyed by index.
    """

    tokens_BT: np.ndarray
    position_BT: np.ndarray
    end_BT: np.ndarray
    at_BC: np.ndarray
    targets_BC: np.ndarray
    places: dict[int, tuple[int, slice]]


def _packed(texts: list[_Text], rows: list[Tree], B: int, T: int) -> _Batch:
    """Write up to B rows with at most T nodes into arrays."""
    counts = [sum(len(texts[n].ids) for n in row.paths) for row in rows]
    C = _round_length(max(counts), 8)
    batch = _Batch(
        tokens_BT=np.zeros((B, T), np.int32),
        position_BT=np.zeros((B, T), np.int32),
        end_BT=np.zeros((B, T), np.int32),
        at_BC=np.zeros((B, C), np.int32),
        targets_BC=np.full((B, C), -1, np.int32),
        places={},
    )
    for number, row in enumerate(rows):
        batch.tokens_BT[number, : len(row.ids)] = row.ids
        batch.position_BT[number, : len(row.ids)] = row.position
        batch.end_BT[number, : len(row.ids)] = row.end
        begin = 0
        for n, path in row.paths.items():
            text = texts[n]
            columns = slice(begin, begin + len(text.ids))
            batch.at_BC[number, columns] = path[len(text.context) - 1 :]
            batch.targets_BC[number, columns] = text.ids
            batch.places[n] = (number, columns)
            begin = columns.stop
    return batch


def _score_batch(lm: LM, texts: list[_Text], rows: list[Tree], B: int, T: int) -> dict[int, Score]:
    """Return the scores of the texts in up to B rows of at most T nodes, keyed by the index of the text."""
    batch = _packed(texts, rows, B, T)
    branches = None
    if any(row.branches for row in rows):
        branches = _Branches(batch.position_BT, batch.end_BT)

    # The logits of all targets may exceed the memory, so the head computes them in chunks.
    C = batch.at_BC.shape[1]
    chunks = math.ceil(B * C / _sizes().head_positions)
    compiled = _compiled(sampler_of(lm).model, math.ceil(C / chunks))
    with use_mesh_of(lm, B):
        found = compiled(lm.params, batch.tokens_BT, batch.at_BC, batch.targets_BC, branches)
    log_p_BC, is_best_BC = map(to_host, block_on_mesh(lm, found))
    return {n: Score(texts[n].ids, log_p_BC[place], is_best_BC[place]) for n, place in batch.places.items()}


@lru_cache(maxsize=16)
def _compiled(model: GPT, chunk: int) -> Callable[..., Any]:
    """Return the jitted function `(params, tokens_BT, at_BC, targets_BC, branches) -> (log_p_BC, is_best_BC)`.

    `branches` are `_Branches`; None: each row is one text.
    """

    def scores(
        params: Any, tokens_BT: jax.Array, at_BC: jax.Array, targets_BC: jax.Array, branches: _Branches | None
    ) -> tuple[jax.Array, jax.Array]:
        reader = model
        positions = None
        if branches is not None:
            attend = partial(attend_to_ancestors, jnp.asarray(branches.end_BT))
            reader = model.clone(ops=model.ops._replace(attend=attend))
            positions = Positions(jnp.asarray(branches.position_BT))
        result: Any = reader.apply({"params": params}, tokens_BT, None, positions, method=GPT.hidden_and_sides)
        x_BTD, _ = result
        x_BCD = jnp.take_along_axis(x_BTD, at_BC[..., None], axis=1)

        def chunk_scores(x_BcD: jax.Array, targets_Bc: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits_BcV: Any = model.apply({"params": params}, x_BcD, method=GPT.head)
            return target_scores(logits_BcV.astype(jnp.float32), targets_Bc)

        return chunked(chunk_scores, x_BCD, targets_BC, chunk)

    return jax.jit(scores)


def target_scores(logits_BcV: jax.Array, targets_Bc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the log probability of each target, in nats, and whether it is the first of the largest logits."""
    # Each line is one pass over the logits. `argmax` would take longer than all of them on a CPU.
    largest_Bc1 = logits_BcV.max(-1, keepdims=True)
    total_Bc = jnp.exp(logits_BcV - largest_Bc1).sum(-1)
    id_BcV = jax.lax.broadcasted_iota(jnp.int32, logits_BcV.shape, 2)
    best_Bc = jnp.where(logits_BcV == largest_Bc1, id_BcV, logits_BcV.shape[-1]).min(-1)

    target_Bc1 = jnp.maximum(targets_Bc, 0)[..., None]
    logit_Bc1 = jnp.take_along_axis(logits_BcV, target_Bc1, axis=-1)
    log_p_Bc = (logit_Bc1 - largest_Bc1)[..., 0] - jnp.log(total_Bc)
    return log_p_Bc, best_Bc == targets_Bc
