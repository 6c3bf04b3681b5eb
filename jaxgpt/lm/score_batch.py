"""A batch of texts to score: its arrays, and the compiled program that computes log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.lm.buffers import round_up
from jaxgpt.lm.model import LM
from jaxgpt.lm.placement import block_on_mesh, use_mesh_of
from jaxgpt.lm.sampler import sampler_of
from jaxgpt.lm.tree import Tree, attend_to_ancestors
from jaxgpt.model import GPT
from jaxgpt.ops.attention import Positions
from jaxgpt.parallel.arrays import to_host
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


def sizes() -> Sizes:
    """Return the sizes for the platform of the first device."""
    return ON_CPU if jax.local_devices()[0].platform == "cpu" else ON_ACCELERATOR


def round_length(n: int, least: int = 16) -> int:
    """Round a length up, so that few shapes occur, to a multiple of `least` or of 1/8 of the next power of two."""
    step = max(round_up(n) // 8, least)
    return math.ceil(n / step) * step


class ContinuedText(NamedTuple):
    """The ids of a context and of its continuation."""

    context: list[int]
    ids: list[int]

    @property
    def inputs(self) -> list[int]:
        """The ids that the model reads: all except the last."""
        return (self.context + self.ids)[:-1]


class Branches(NamedTuple):
    """The nodes of rows that are trees (`tree.Tree`).

    Attributes:
        position_BT: position of each node in its texts.
        end_BT: node after the last descendant of each node.
    """

    position_BT: jax.Array | np.ndarray
    end_BT: jax.Array | np.ndarray


class ScoreBatch(NamedTuple):
    """Rows of texts, padded on the right, where a causal model needs no mask.

    Attributes:
        tokens_BT: id of each node.
        branches: the nodes of the rows as trees; None: no row has branches.
        at_BC: the nodes that predict the targets; the head computes logits only there.
        targets_BC: these targets; -1: padding.
        places: row and columns of the targets of each text, keyed by index.
    """

    tokens_BT: np.ndarray
    branches: Branches | None
    at_BC: np.ndarray
    targets_BC: np.ndarray
    places: dict[int, tuple[int, slice]]


def pack(texts: list[ContinuedText], rows: list[Tree], B: int, T: int) -> ScoreBatch:
    """Write up to B rows with at most T nodes into arrays."""
    tokens_BT = np.zeros((B, T), np.int32)
    position_BT = np.zeros((B, T), np.int32)
    end_BT = np.zeros((B, T), np.int32)
    for number, row in enumerate(rows):
        nodes = slice(len(row.ids))
        tokens_BT[number, nodes] = row.ids
        position_BT[number, nodes] = row.position
        end_BT[number, nodes] = row.end
    has_branches = any(row.branches for row in rows)

    # The targets of a row are the continuations of its texts, side by side.
    counts = [sum(len(texts[n].ids) for n in row.paths) for row in rows]
    C = round_length(max(counts), 8)
    at_BC = np.zeros((B, C), np.int32)
    targets_BC = np.full((B, C), -1, np.int32)
    places = {}
    for number, row in enumerate(rows):
        begin = 0
        for n, path in row.paths.items():
            text = texts[n]
            columns = slice(begin, begin + len(text.ids))
            at_BC[number, columns] = path[len(text.context) - 1 :]
            targets_BC[number, columns] = text.ids
            places[n] = (number, columns)
            begin = columns.stop
    return ScoreBatch(
        tokens_BT=tokens_BT,
        branches=Branches(position_BT, end_BT) if has_branches else None,
        at_BC=at_BC,
        targets_BC=targets_BC,
        places=places,
    )


def compute_batch(lm: LM, batch: ScoreBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the log probability of each target, and whether it is the most probable id, both `[B, C]`."""
    # The logits of all targets may exceed the memory, so the head computes them in chunks.
    B, C = batch.at_BC.shape
    chunks = math.ceil(B * C / sizes().head_positions)
    compiled = _compiled(sampler_of(lm).model, math.ceil(C / chunks))
    with use_mesh_of(lm, B):
        found = compiled(lm.params, batch.tokens_BT, batch.at_BC, batch.targets_BC, batch.branches)
    log_p_BC, is_best_BC = map(to_host, block_on_mesh(lm, found))
    return log_p_BC, is_best_BC


@lru_cache(maxsize=16)
def _compiled(model: GPT, chunk: int) -> Callable[..., Any]:
    """Return the jitted function `(params, tokens_BT, at_BC, targets_BC, branches) -> (log_p_BC, is_best_BC)`.

    `branches` are `Branches`; None: each row is one text.
    """

    def scores(
        params: Any, tokens_BT: jax.Array, at_BC: jax.Array, targets_BC: jax.Array, branches: Branches | None
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
    # The maximum, the sum and the minimum each take one pass over the logits. On a CPU, `argmax` would take longer than these
    # three passes.
    largest_Bc1 = logits_BcV.max(-1, keepdims=True)
    total_Bc = jnp.exp(logits_BcV - largest_Bc1).sum(-1)
    id_BcV = jax.lax.broadcasted_iota(jnp.int32, logits_BcV.shape, 2)
    best_Bc = jnp.where(logits_BcV == largest_Bc1, id_BcV, logits_BcV.shape[-1]).min(-1)

    target_Bc1 = jnp.maximum(targets_Bc, 0)[..., None]
    logit_Bc1 = jnp.take_along_axis(logits_BcV, target_Bc1, axis=-1)
    log_p_Bc = (logit_Bc1 - largest_Bc1)[..., 0] - jnp.log(total_Bc)
    return log_p_Bc, best_Bc == targets_Bc
