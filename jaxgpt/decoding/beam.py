"""Beam search: extend several sequences per prompt and keep the most probable sequences at each step.

Finished sequences, stopping criterion and length penalty follow transformers 5 (`GenerationMixin._beam_search`).
Up to rounding, texts and scores match transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import BeamParams
from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.decoding.sampler import Sampler, extend, read_prompts
from jaxgpt.decoding.sampling import warp
from jaxgpt.model import KVCache

NO_SCORE = -jnp.inf  # score of a beam that must not be continued, and of an empty entry of `Hypotheses`


class Hypotheses(NamedTuple):
    """The finished sequences of each prompt, best first.

    Attributes:
        ids_BWS: int32, prompt with its padding, and new ids; later ids are undefined.
        length_BW: int32, number of new ids, including a stop id; 0 if there is no sequence.
        score_BW: float32, `log p / length ** length_penalty`; `NO_SCORE` if there is no sequence.
    """

    ids_BWS: jax.Array
    length_BW: jax.Array
    score_BW: jax.Array

    @property
    def exists_BW(self) -> jax.Array:  # noqa: N802
        """Whether each entry is a finished sequence."""
        return self.score_BW != NO_SCORE


class Candidates(NamedTuple):
    """The best one-token continuations of the beams of each prompt.

    Attributes:
        log_p_BC: log probability of the extended text.
        beam_BC: index of the continued beam.
        id_BC: the next id.
        ids_BCS: ids of the extended text.
    """

    log_p_BC: jax.Array
    beam_BC: jax.Array
    id_BC: jax.Array
    ids_BCS: jax.Array


class BeamState(NamedTuple):
    """The state of the search between steps.

    Attributes:
        text: the running (unfinished) sequences, X = B * W rows.
        cache: KV cache of the sequences without their last tokens.
        score_BW: float32, log p of each running sequence; `NO_SCORE` if it must not be continued.
        best: best finished sequences so far.
        active_B: bool, false once the search of a row has stopped (see `_active_rows`).
        made: int32 scalar, number of ids generated so far per sequence.
        limit_B: int32, the maximum number of new ids of each prompt.
    """

    text: TokenBuffer
    cache: KVCache
    score_BW: jax.Array
    best: Hypotheses
    active_B: jax.Array
    made: jax.Array
    limit_B: jax.Array


@dataclass(frozen=True)
class BeamSearch:
    """Beam search as pure functions: `prefill`, then `step` while `is_active`.

    Attributes:
        sampler: model, repetition penalty, `no_repeat_ngram_size`, custom filters and stop ids. The temperature must be
            1; top-k, top-p and min-p must be off: `lm.beams` sets the temperature, and rejects the other settings.
        beams: beam search parameters.
        size: number of slots for the whole text, prompt included.
    """

    sampler: Sampler
    beams: BeamParams
    size: int

    def run(self, params: Any, text: TokenBuffer, limit_B: jax.Array) -> Hypotheses:
        """Run the search, and return the best finished sequences; arguments as in `prefill`."""
        start = self.prefill(params, text, limit_B)
        final = jax.lax.while_loop(self.is_active, lambda state: self.step(params, state), start)
        return final.best

    def prefill(self, params: Any, text: TokenBuffer, limit_B: jax.Array) -> BeamState:
        """Prefill the cache with the prompts, and return the initial state.

        Args:
            params: the weights.
            text: the prompts, padded on the left, without unused slots.
            limit_B: int32, the maximum number of new ids of each prompt.
        """
        B, P = text.ids_BS.shape
        W = self.beams.num_beams
        cache = read_prompts(self.sampler.model, params, text, self.size)
        ids_BS = jnp.pad(text.ids_BS, ((0, 0), (0, self.size - P)))

        # The beams of a prompt are consecutive rows.
        repeat = partial(jnp.repeat, repeats=W, axis=0)
        ids_XS = repeat(ids_BS)
        position_XS = repeat(cache.position_BS)
        layers = jax.tree.map(repeat, cache.layers)

        nothing_finished = Hypotheses(
            ids_BWS=ids_XS.reshape(B, W, -1),
            length_BW=jnp.zeros((B, W), jnp.int32),
            score_BW=jnp.full((B, W), NO_SCORE, jnp.float32),
        )
        # At first all beams are equal, so only the first may be continued.
        log_p_W = jnp.where(jnp.arange(W) == 0, jnp.float32(0), NO_SCORE)
        return BeamState(
            text=TokenBuffer(ids_XS, text.length),
            cache=cache._replace(position_BS=position_XS, layers=layers),
            score_BW=jnp.broadcast_to(log_p_W[None, :], (B, W)),
            best=nothing_finished,
            active_B=jnp.ones((B,), bool),
            made=jnp.int32(0),
            limit_B=jnp.asarray(limit_B),
        )

    def is_active(self, state: BeamState) -> jax.Array:
        """Return whether a further step can change the result."""
        return jnp.any(state.active_B) & (state.made < state.limit_B.max())

    def candidates(self, state: BeamState, logits_XV: jax.Array) -> Candidates:
        """Find the C best one-token continuations; at least W add no stop id, unless all ids are stop ids."""
        B, W = state.score_BW.shape
        V = logits_XV.shape[-1]
        per_beam = max(2, 1 + len(self.sampler.stop_ids))  # at most len(stop_ids) of a beam's continuations end
        C = min(per_beam, V) * W

        log_p_XV = jax.nn.log_softmax(logits_XV, axis=-1)
        log_p_XV = warp(log_p_XV, state.text, self.sampler.sampling, self.sampler.filters)
        log_p_BWV = log_p_XV.reshape(B, W, V) + state.score_BW[:, :, None]
        log_p_BC, flat_BC = jax.lax.top_k(log_p_BWV.reshape(B, W * V), C)

        # Continue the text of each chosen beam with the chosen id.
        beam_BC = flat_BC // V
        id_BC = (flat_BC % V).astype(jnp.int32)
        ids_BWS = state.text.ids_BS.reshape(B, W, -1)
        ids_BCS = gather_beams(ids_BWS, beam_BC)
        ids_BCS = ids_BCS.at[:, :, state.text.length].set(id_BC)
        return Candidates(log_p_BC, beam_BC, id_BC, ids_BCS)

    def step(self, params: Any, state: BeamState) -> BeamState:
        """Extend the beams by one token; keep the best W running and the best W finished sequences."""
        last_X1 = state.text.last(1).ids_BS
        logits_X1V, cache = extend(self.sampler.model, params, last_X1, state.cache)
        found = self.candidates(state, logits_X1V[:, -1])
        B, _ = found.id_BC.shape
        W = self.beams.num_beams

        # NaN also ends a sequence; the caller then reports the NaN.
        at_limit_B = state.made + 1 >= state.limit_B
        ends_BC = self.sampler.ends(found.id_BC) | at_limit_B[:, None] | jnp.isnan(found.log_p_BC)

        # Select the best W unfinished candidates.
        running_BC = jnp.where(ends_BC, NO_SCORE, found.log_p_BC)
        score_BW, next_BW = jax.lax.top_k(running_BC, W)
        ids_BWS = gather_beams(found.ids_BCS, next_BW)
        beam_BW = gather_beams(found.beam_BC, next_BW)
        # Positions are not reordered, because the beams of a prompt have equal positions.
        row_X = (jnp.arange(B)[:, None] * W + beam_BW).reshape(-1)
        layers = jax.tree.map(lambda x: x[row_X], cache.layers)

        best = self._finished(state, found, ends_BC)
        return state._replace(
            text=TokenBuffer(ids_BWS.reshape(B * W, -1), state.text.length + 1),
            cache=cache._replace(layers=layers),
            score_BW=score_BW,
            best=best,
            active_B=self._active_rows(state, score_BW[:, 0], best),
            made=state.made + 1,
        )

    def _finished(self, state: BeamState, found: Candidates, ends_BC: jax.Array) -> Hypotheses:
        """Return the best W finished sequences of this and the previous steps."""
        B, C = found.id_BC.shape
        W = self.beams.num_beams
        made = state.made + 1

        # As in transformers, a sequence finishes only if it is among the W best candidates.
        among_best_C = jnp.arange(C) < W
        finishes_BC = ends_BC & among_best_C[None, :] & state.active_B[:, None] & (found.log_p_BC != NO_SCORE)
        new_BC = jnp.where(finishes_BC, self._score(found.log_p_BC, made), NO_SCORE)
        new = Hypotheses(found.ids_BCS, jnp.full((B, C), made), new_BC)

        both = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), state.best, new)
        _, best_BW = jax.lax.top_k(both.score_BW, W)
        best: Hypotheses = jax.tree.map(lambda x: gather_beams(x, best_BW), both)
        return best

    def _active_rows(self, state: BeamState, running_B: jax.Array, best: Hypotheses) -> jax.Array:
        """Return the rows that continue, bool `[B]`, from the log probability of the best running sequence of each row.

        A row stops if its best running sequence is not expected to beat its worst finished sequence. The expected score is
        computed at the current length; with "never" and a positive penalty, at the limit, the length with the highest score.
        If `early_stopping` is True, a row also stops once W sequences are finished.
        """
        longest = self.beams.early_stopping == "never" and self.beams.length_penalty > 0
        length_B = jnp.maximum(state.limit_B, 1) if longest else jnp.full(running_B.shape, state.made + 1)
        expected_B = self._score(running_B, length_B)
        active_B = state.active_B & (expected_B > best.score_BW.min(-1))
        if self.beams.early_stopping is True:
            active_B = active_B & ~best.exists_BW.all(-1)
        return active_B

    def _score(self, log_p: jax.Array, length: jax.Array) -> jax.Array:
        """Compute `log p / length ** length_penalty`."""
        return log_p / length.astype(jnp.float32) ** self.beams.length_penalty


def gather_beams(x: jax.Array, which_Bn: jax.Array) -> jax.Array:
    """Select the entries `which_Bn` of each row of `x`, `[B, W, ...]` to `[B, n, ...]`."""
    row_B1 = jnp.arange(x.shape[0])[:, None]
    return x[row_B1, which_Bn]
