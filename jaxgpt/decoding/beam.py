"""Beam search: extend several texts at once, keep the most probable at every step.

The rules are transformers' (`GenerationMixin._beam_search`, version 5): when a text counts as finished, when to stop, how
length enters the score. Texts and scores are equal to its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import BeamParams, SamplingParams
from jaxgpt.decoding.sampler import Model
from jaxgpt.decoding.sampling import TokenBuffer, warp

WORST = -1.0e9  # below every score, and finite: sums of it stay comparable


class Hypotheses(NamedTuple):
    """The finished texts of each prompt, best first.

    Attributes:
        ids_BWn: int32, new ids; those beyond a text's length mean nothing.
        length_BW: int32, number of ids, the one that ended the text included; 0 where there is no text.
        score_BW: float32, `log p / length ** length_penalty`.
    """

    ids_BWn: jax.Array
    length_BW: jax.Array
    score_BW: jax.Array


class BeamState(NamedTuple):
    """The state of the search between steps.

    Attributes:
        ids_BWS: int32, running texts, prompt included.
        score_BW: float32, log p of each.
        best: finished texts.
        finished_BW: which of `best` hold a text.
        active_B: whether a running text can still become one of the best.
        cache: the model's, of B * W rows.
        logits_BWV: of the next ids.
        made: int32 scalar, ids generated so far.
        start_B: int32, the slot of each prompt's first id.
        limit_B: int32, the maximum number of new ids.
    """

    ids_BWS: jax.Array
    score_BW: jax.Array
    best: Hypotheses
    finished_BW: jax.Array
    active_B: jax.Array
    cache: Any
    logits_BWV: jax.Array
    made: jax.Array
    start_B: jax.Array
    limit_B: jax.Array


class Candidates(NamedTuple):
    """The K most probable continuations of a prompt's running texts by one id.

    Attributes:
        score_BK: float32, log p of each.
        beam_BK: int32, which text is continued.
        id_BK: int32, the id that continues it.
        ids_BKn: int32, all new ids.
    """

    score_BK: jax.Array
    beam_BK: jax.Array
    id_BK: jax.Array
    ids_BKn: jax.Array


@dataclass(frozen=True)
class BeamSearch:
    """Beam search as pure functions: `prefill`, then `step` over `candidates` while `open`.

    Attributes:
        size: slots for the whole text, prompt included.
        model: the model's functions.
        sampling: repetition penalty and n-grams, at temperature 1 and without the filters of drawing.
        beams: number of beams and how they compare.
        stop_ids: ids that end a text.
    """

    size: int
    model: Model
    sampling: SamplingParams
    beams: BeamParams
    stop_ids: tuple[int, ...]

    def run(self, params: Any, text: TokenBuffer, limit_B: jax.Array) -> Hypotheses:
        """Search to the end, where only ids end a text; arguments as for `prefill`."""

        def step(state: BeamState) -> BeamState:
            candidates = self.candidates(state)
            return self.step(params, state, candidates, jnp.zeros(candidates.id_BK.shape, bool))

        return jax.lax.while_loop(self.open, step, self.prefill(params, text, limit_B)).best

    def prefill(self, params: Any, text: TokenBuffer, limit_B: jax.Array) -> BeamState:
        """Compute the cache of the prompts.

        Args:
            params: the weights.
            text: the prompts, which fill `text.ids_BS`.
            limit_B: int32, the maximum number of new ids; 0 for a row that only pads the batch.
        """
        (B, P), W = text.ids_BS.shape, self.beams.num_beams
        logits_B1V, cache = self.model.extend(params, text.ids_BS, self.model.cache(text.start_B, self.size), True)
        ids_BS = jnp.pad(text.ids_BS, ((0, 0), (0, self.size - P)))
        worst = jnp.float32(WORST)
        none = Hypotheses(
            jnp.zeros((B, W, self.size - P), jnp.int32), jnp.zeros((B, W), jnp.int32), jnp.full((B, W), worst)
        )
        return BeamState(
            ids_BWS=jnp.repeat(ids_BS[:, None], W, 1),
            # At first all beams are the same text: only its first copy may be continued.
            score_BW=jnp.broadcast_to(jnp.where(jnp.arange(W) == 0, jnp.float32(0), worst)[None, :], (B, W)),
            best=none,
            finished_BW=jnp.zeros((B, W), bool),
            active_B=jnp.ones((B,), bool),
            cache=jax.tree.map(lambda x: jnp.repeat(x, W, 0) if x.ndim else x, cache),
            logits_BWV=jnp.repeat(logits_B1V, W, 1),
            made=jnp.int32(0),
            start_B=jnp.asarray(text.start_B),
            limit_B=jnp.asarray(limit_B),
        )

    def open(self, state: BeamState) -> jax.Array:
        """Whether another step can change the best texts."""
        go_on = jnp.any(state.active_B) & (state.made < state.limit_B.max())
        return go_on & ~jnp.all(state.finished_BW) if self.beams.early_stopping is True else go_on

    def candidates(self, state: BeamState) -> Candidates:
        """Find the K most probable continuations: enough for W to go on even if every stop id is among them."""
        B, W, V = state.logits_BWV.shape
        P = self.size - state.best.ids_BWn.shape[-1]
        K = min(max(2, 1 + len(self.stop_ids)), V) * W
        text = TokenBuffer(state.ids_BWS.reshape(B * W, -1), jnp.repeat(state.start_B, W), P + state.made)
        log_p = jax.nn.log_softmax(state.logits_BWV, axis=-1).reshape(B * W, V)
        log_p = warp(log_p, text, self.sampling).reshape(B, W, V)
        score_BK, flat_BK = jax.lax.top_k((log_p + state.score_BW[:, :, None]).reshape(B, W * V), K)
        beam_BK, id_BK = flat_BK // V, (flat_BK % V).astype(jnp.int32)
        ids_BKn = gather_beams(state.ids_BWS[:, :, P:], beam_BK).at[:, :, state.made].set(id_BK)
        return Candidates(score_BK, beam_BK, id_BK, ids_BKn)

    def step(self, params: Any, state: BeamState, candidates: Candidates, stopped_BK: jax.Array) -> BeamState:
        """Keep the best W candidates that go on and the best W texts that have ended.

        Args:
            params: the weights.
            state: as `prefill` or this function returned it.
            candidates: of this state.
            stopped_BK: bool, which of them end a text by what they spell; stop ids and limits do so anyway.
        """
        top_BK, beam_BK, id_BK, ids_BKn = candidates
        (B, K), W, V = id_BK.shape, self.beams.num_beams, state.logits_BWV.shape[-1]
        P, weigh = self.size - ids_BKn.shape[-1], self.beams.length_penalty
        made = state.made + 1
        stops = jnp.asarray(self.stop_ids, jnp.int32)
        ends_BK = stopped_BK | jnp.isin(id_BK, stops) | (made >= state.limit_B)[:, None]

        def score(log_p: jax.Array, length: jax.Array) -> jax.Array:
            return log_p / length.astype(jnp.float32) ** weigh

        # The best W that go on.
        score_BW, next_BW = jax.lax.top_k(top_BK + ends_BK.astype(jnp.float32) * WORST, W)
        beam_BW, token_BW = gather_beams(beam_BK, next_BW), gather_beams(id_BK, next_BW)
        ids_BWS = jnp.concatenate(
            [gather_beams(state.ids_BWS[:, :, :P], beam_BW), gather_beams(ids_BKn, next_BW)], axis=-1
        )

        # Finished texts: only those among the W best candidates count.
        finishes_BK = ends_BK & (jnp.arange(K) < W)[None, :]
        closed_B1 = ~state.active_B[:, None]
        if self.beams.early_stopping is True:
            closed_B1 = closed_B1 | state.finished_BW.all(-1, keepdims=True)
        penalty_BK = (closed_B1.astype(jnp.float32) + (~finishes_BK).astype(jnp.float32)) * WORST
        best_BW, from_BW = jax.lax.top_k(
            jnp.concatenate([state.best.score_BW, score(top_BK, made) + penalty_BK], axis=1), W
        )
        best = Hypotheses(
            gather_beams(jnp.concatenate([state.best.ids_BWn, ids_BKn], axis=1), from_BW),
            gather_beams(jnp.concatenate([state.best.length_BW, jnp.full((B, K), made)], axis=1), from_BW),
            best_BW,
        )
        finished_BW = gather_beams(jnp.concatenate([state.finished_BW, finishes_BK], axis=1), from_BW)

        # Can the best running text still beat the worst finished one?
        far = self.beams.early_stopping == "never" and weigh > 0
        farthest_B = jnp.maximum(state.limit_B, 1) if far else jnp.full((B,), made)
        worst_BW = jnp.where(finished_BW, best_BW.min(-1, keepdims=True), WORST)
        active_B = state.active_B & jnp.any(score(score_BW[:, :1], farthest_B[:, None]) > worst_BW, axis=-1)

        flat = (jnp.arange(B)[:, None] * W + beam_BW).reshape(-1)
        cache = jax.tree.map(lambda x: x[flat] if x.ndim == 4 else x, state.cache)
        logits, cache = self.model.extend(params, token_BW.reshape(B * W, 1), cache, True)
        return state._replace(
            ids_BWS=ids_BWS,
            score_BW=score_BW,
            best=best,
            finished_BW=finished_BW,
            active_B=active_B,
            cache=cache,
            logits_BWV=logits.reshape(B, W, V),
            made=made,
        )


def gather_beams(x: jax.Array, which_Bn: jax.Array) -> jax.Array:
    """Select entries of each row of `x`."""
    return x[jnp.arange(x.shape[0])[:, None], which_Bn]
