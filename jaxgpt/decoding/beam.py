"""Beam search in one program: several texts at once, the likeliest of all kept at every step.

The rules are transformers' (`GenerationMixin._beam_search`, version 5): what counts as finished, when to stop, how lengths
weigh. Texts and scores are the same, so that results can be compared with published ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import UserError
from jaxgpt.decoding.policy import History, Policy, warp
from jaxgpt.decoding.sampler import Model

WORST = -1.0e9  # below every score, and finite: sums of it stay comparable


@dataclass(frozen=True)
class Beams:
    """How beams are kept and compared.

    Attributes:
        num_beams: W, texts at once for each prompt.
        num_return_sequences: the best so many of them are returned.
        length_penalty: a finished text's score is `log p / length ** length_penalty`; above 0: longer ones gain.
        early_stopping: true: stop when W texts have finished; false: when no running one seems able to become better;
            never: when none can.
    """

    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise UserError(f"num-beams must be at least 1, not {self.num_beams}")
        if self.num_return_sequences < 1:
            raise UserError(f"num-return-sequences must be at least 1, not {self.num_return_sequences}")
        if self.num_beams > 1 and self.num_return_sequences > self.num_beams:
            raise UserError(
                f"num-return-sequences {self.num_return_sequences} is more than num-beams {self.num_beams}: "
                f"there are only so many texts to return"
            )
        if not math.isfinite(self.length_penalty):
            raise UserError(f"length-penalty must be a finite number, not {self.length_penalty}")
        if self.early_stopping not in (True, False, "never"):
            raise UserError(f"early-stopping must be true, false or never, not {self.early_stopping!r}")


class Found(NamedTuple):
    """The best texts of each prompt, best first.

    Attributes:
        ids_BWn: int32, new ids; what stands beyond a text's length means nothing.
        length_BW: int32, ids of each, the one that ended it included.
        score_BW: float32, `log p / length ** length_penalty`.
    """

    ids_BWn: jax.Array
    length_BW: jax.Array
    score_BW: jax.Array


class _State(NamedTuple):
    ids_BWS: jax.Array  # running texts, prompt included
    score_BW: jax.Array  # log p of each
    best: Found  # finished texts
    finished_BW: jax.Array  # which of `best` are texts at all
    hopeful_B: jax.Array  # whether a running text may still become one of the best
    exhausted: jax.Array  # whether no text can be continued
    cache: Any  # of B * W rows
    logits_BWV: jax.Array
    made: jax.Array  # int32 scalar, ids made so far


def beam_search(
    params: Any,
    history: History,
    limit_B: jax.Array,
    *,
    size: int,
    model: Model,
    policy: Policy,
    beams: Beams,
    stop_ids: tuple[int, ...],
) -> Found:
    """The likeliest texts that beams of a given number come upon.

    Args:
        params: the weights.
        history: the prompts, in slots up to `history.ids_BS.shape[1]`, and nothing else.
        limit_B: int32, how many ids at most; 0 for a row that only fills up a bucket.
        size: slots that prompt and text may take.
        model: the functions.
        policy: repetition penalty and n-grams; whatever needs chance has no part in this.
        beams: how beams are kept and compared.
        stop_ids: ids that end a text.
    """
    B, P = history.ids_BS.shape
    W = beams.num_beams
    K = max(2, 1 + len(stop_ids)) * W  # candidates: even if every stop id is among them, W can be continued
    rows_B1 = jnp.arange(B)[:, None]
    start_BW = jnp.repeat(history.start_B, W)
    width_W = jnp.arange(W)
    weigh = beams.length_penalty

    def pick(x: jax.Array, beam_Bn: jax.Array) -> jax.Array:
        return x[rows_B1, beam_Bn]

    def score(log_p: jax.Array, length: jax.Array) -> jax.Array:
        return log_p / length.astype(jnp.float32) ** weigh

    def open_(state: _State) -> jax.Array:
        go_on = jnp.any(state.hopeful_B) & ~state.exhausted & (state.made < limit_B.max())
        return go_on & ~jnp.all(state.finished_BW) if beams.early_stopping is True else go_on

    def step(state: _State) -> _State:
        length, V = P + state.made, state.logits_BWV.shape[-1]
        flat_BW = state.ids_BWS.reshape(B * W, size)
        log_p = jax.nn.log_softmax(state.logits_BWV, axis=-1).reshape(B * W, V)
        log_p = warp(log_p, History(flat_BW, start_BW, length), policy).reshape(B, W, V)
        top_BK, flat_BK = jax.lax.top_k((log_p + state.score_BW[:, :, None]).reshape(B, W * V), K)
        beam_BK, id_BK = flat_BK // V, (flat_BK % V).astype(jnp.int32)
        ids_BKS = pick(state.ids_BWS, beam_BK).at[:, :, length].set(id_BK)
        made = state.made + 1
        ends_BK = jnp.isin(id_BK, jnp.asarray(stop_ids, jnp.int32)) | (made >= limit_B)[:, None]

        # The best W that go on.
        score_BW, next_BW = jax.lax.top_k(top_BK + ends_BK.astype(jnp.float32) * WORST, W)
        beam_BW, token_BW = pick(beam_BK, next_BW), pick(id_BK, next_BW)

        exhausted = jnp.all(ends_BK)

        # Finished texts: only those among the W best candidates count.
        ends_BK = ends_BK & (jnp.arange(K) < W)[None, :]
        closed_B1 = ~state.hopeful_B[:, None]
        if beams.early_stopping is True:
            closed_B1 = closed_B1 | state.finished_BW.all(-1, keepdims=True)
        penalty_BK = (closed_B1.astype(jnp.float32) + (~ends_BK).astype(jnp.float32)) * WORST
        best_BW, from_BW = jax.lax.top_k(
            jnp.concatenate([state.best.score_BW, score(top_BK, made) + penalty_BK], axis=1), W
        )
        best = Found(
            pick(jnp.concatenate([state.best.ids_BWn, ids_BKS[:, :, P:]], axis=1), from_BW),
            pick(jnp.concatenate([state.best.length_BW, jnp.full((B, K), made)], axis=1), from_BW),
            best_BW,
        )
        finished_BW = pick(jnp.concatenate([state.finished_BW, ends_BK], axis=1), from_BW)

        # Can the best running text still beat the worst finished one?
        farthest_B = jnp.maximum(limit_B, 1) if beams.early_stopping == "never" and weigh > 0 else jnp.full((B,), made)
        worst_BW = jnp.where(finished_BW, best_BW.min(-1, keepdims=True), WORST)
        hopeful_B = state.hopeful_B & jnp.any(score(score_BW[:, :1], farthest_B[:, None]) > worst_BW, axis=-1)

        flat = (rows_B1 * W + beam_BW).reshape(-1)
        cache = jax.tree.map(lambda x: x[flat] if x.ndim == 4 else x, state.cache)
        logits, cache = model.extend(params, token_BW.reshape(B * W, 1), cache, True)
        return _State(
            pick(ids_BKS, next_BW),
            score_BW,
            best,
            finished_BW,
            hopeful_B,
            exhausted,
            cache,
            logits.reshape(B, W, V),
            made,
        )

    logits_B1V, cache = model.extend(params, history.ids_BS, model.cache(history.start_B, size), True)
    cache = jax.tree.map(lambda x: jnp.repeat(x, W, 0) if x.ndim else x, cache)
    ids_BS = jnp.pad(history.ids_BS, ((0, 0), (0, size - P)))
    state = _State(
        ids_BWS=jnp.repeat(ids_BS[:, None], W, 1),
        # At first all beams are one text: only its first copy may be continued.
        score_BW=jnp.broadcast_to(jnp.where(width_W == 0, 0.0, WORST)[None, :], (B, W)),
        best=Found(jnp.zeros((B, W, size - P), jnp.int32), jnp.zeros((B, W), jnp.int32), jnp.full((B, W), WORST)),
        finished_BW=jnp.zeros((B, W), bool),
        hopeful_B=jnp.ones((B,), bool),
        exhausted=jnp.array(False),
        cache=cache,
        logits_BWV=jnp.repeat(logits_B1V, W, 1),
        made=jnp.int32(0),
    )
    return jax.lax.while_loop(open_, step, state).best
