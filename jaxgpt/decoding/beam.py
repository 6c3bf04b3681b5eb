"""Beam search: several texts at once, the likeliest of all kept at every step.

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


class BeamState(NamedTuple):
    """What one step of the search hands to the next.

    Attributes:
        ids_BWS: int32, running texts, prompt included.
        score_BW: log p of each.
        best: finished texts.
        finished_BW: which of `best` are texts at all.
        hopeful_B: whether a running text may still become one of the best.
        cache: the model's, of B * W rows.
        logits_BWV: of the next ids.
        made: int32 scalar, ids made so far.
        start_B: int32, the slot of each prompt's first id.
        limit_B: int32, how many ids at most.
    """

    ids_BWS: jax.Array
    score_BW: jax.Array
    best: Found
    finished_BW: jax.Array
    hopeful_B: jax.Array
    cache: Any
    logits_BWV: jax.Array
    made: jax.Array
    start_B: jax.Array
    limit_B: jax.Array


class Candidates(NamedTuple):
    """The likeliest continuations of a prompt's running texts, by one id each.

    Attributes:
        score_BK: log p of each.
        beam_BK: int32, which text is continued.
        id_BK: int32, with what.
        ids_BKn: int32, all new ids.
    """

    score_BK: jax.Array
    beam_BK: jax.Array
    id_BK: jax.Array
    ids_BKn: jax.Array


@dataclass(frozen=True)
class BeamSearch:
    """The likeliest texts that beams of a given number come upon: `begin`, then `advance` over `candidates` while `open`.

    Attributes:
        size: slots that prompt and text may take.
        model: the functions.
        policy: repetition penalty and n-grams; whatever needs chance has no part in this.
        beams: how beams are kept and compared.
        stop_ids: ids that end a text.
    """

    size: int
    model: Model
    policy: Policy
    beams: Beams
    stop_ids: tuple[int, ...]

    def run(self, params: Any, history: History, limit_B: jax.Array) -> Found:
        """The whole search, where ids alone end a text; arguments as of `begin`."""

        def step(state: BeamState) -> BeamState:
            candidates = self.candidates(state)
            return self.advance(params, state, candidates, jnp.zeros(candidates.id_BK.shape, bool))

        return jax.lax.while_loop(self.open, step, self.begin(params, history, limit_B)).best

    def begin(self, params: Any, history: History, limit_B: jax.Array) -> BeamState:
        """Read the prompts.

        Args:
            params: the weights.
            history: the prompts, in slots up to `history.ids_BS.shape[1]`, and nothing else.
            limit_B: int32, how many ids at most; 0 for a row that only fills up a bucket.
        """
        (B, P), W = history.ids_BS.shape, self.beams.num_beams
        logits_B1V, cache = self.model.extend(
            params, history.ids_BS, self.model.cache(history.start_B, self.size), True
        )
        ids_BS = jnp.pad(history.ids_BS, ((0, 0), (0, self.size - P)))
        none = Found(jnp.zeros((B, W, self.size - P), jnp.int32), jnp.zeros((B, W), jnp.int32), jnp.full((B, W), WORST))
        return BeamState(
            ids_BWS=jnp.repeat(ids_BS[:, None], W, 1),
            # At first all beams are one text: only its first copy may be continued.
            score_BW=jnp.broadcast_to(jnp.where(jnp.arange(W) == 0, 0.0, WORST)[None, :], (B, W)),
            best=none,
            finished_BW=jnp.zeros((B, W), bool),
            hopeful_B=jnp.ones((B,), bool),
            cache=jax.tree.map(lambda x: jnp.repeat(x, W, 0) if x.ndim else x, cache),
            logits_BWV=jnp.repeat(logits_B1V, W, 1),
            made=jnp.int32(0),
            start_B=jnp.asarray(history.start_B),
            limit_B=jnp.asarray(limit_B),
        )

    def open(self, state: BeamState) -> jax.Array:
        """Whether another step can change the best texts."""
        go_on = jnp.any(state.hopeful_B) & (state.made < state.limit_B.max())
        return go_on & ~jnp.all(state.finished_BW) if self.beams.early_stopping is True else go_on

    def candidates(self, state: BeamState) -> Candidates:
        """The K likeliest continuations: so many that W go on even if every stop id is among them."""
        B, W, V = state.logits_BWV.shape
        P = self.size - state.best.ids_BWn.shape[-1]
        K = max(2, 1 + len(self.stop_ids)) * W
        history = History(state.ids_BWS.reshape(B * W, -1), jnp.repeat(state.start_B, W), P + state.made)
        log_p = jax.nn.log_softmax(state.logits_BWV, axis=-1).reshape(B * W, V)
        log_p = warp(log_p, history, self.policy).reshape(B, W, V)
        score_BK, flat_BK = jax.lax.top_k((log_p + state.score_BW[:, :, None]).reshape(B, W * V), K)
        beam_BK, id_BK = flat_BK // V, (flat_BK % V).astype(jnp.int32)
        ids_BKn = _pick(state.ids_BWS[:, :, P:], beam_BK).at[:, :, state.made].set(id_BK)
        return Candidates(score_BK, beam_BK, id_BK, ids_BKn)

    def advance(self, params: Any, state: BeamState, candidates: Candidates, stopped_BK: jax.Array) -> BeamState:
        """Keep the best W candidates that go on and the best W texts that have ended.

        Args:
            params: the weights.
            state: as `begin` or this left it.
            candidates: of this state.
            stopped_BK: bool, which of them end a text by what they say; stop ids and limits do so anyway.
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
        beam_BW, token_BW = _pick(beam_BK, next_BW), _pick(id_BK, next_BW)
        ids_BWS = jnp.concatenate([_pick(state.ids_BWS[:, :, :P], beam_BW), _pick(ids_BKn, next_BW)], axis=-1)

        # Finished texts: only those among the W best candidates count.
        finishes_BK = ends_BK & (jnp.arange(K) < W)[None, :]
        closed_B1 = ~state.hopeful_B[:, None]
        if self.beams.early_stopping is True:
            closed_B1 = closed_B1 | state.finished_BW.all(-1, keepdims=True)
        penalty_BK = (closed_B1.astype(jnp.float32) + (~finishes_BK).astype(jnp.float32)) * WORST
        best_BW, from_BW = jax.lax.top_k(
            jnp.concatenate([state.best.score_BW, score(top_BK, made) + penalty_BK], axis=1), W
        )
        best = Found(
            _pick(jnp.concatenate([state.best.ids_BWn, ids_BKn], axis=1), from_BW),
            _pick(jnp.concatenate([state.best.length_BW, jnp.full((B, K), made)], axis=1), from_BW),
            best_BW,
        )
        finished_BW = _pick(jnp.concatenate([state.finished_BW, finishes_BK], axis=1), from_BW)

        # Can the best running text still beat the worst finished one?
        far = self.beams.early_stopping == "never" and weigh > 0
        farthest_B = jnp.maximum(state.limit_B, 1) if far else jnp.full((B,), made)
        worst_BW = jnp.where(finished_BW, best_BW.min(-1, keepdims=True), WORST)
        hopeful_B = state.hopeful_B & jnp.any(score(score_BW[:, :1], farthest_B[:, None]) > worst_BW, axis=-1)

        flat = (jnp.arange(B)[:, None] * W + beam_BW).reshape(-1)
        cache = jax.tree.map(lambda x: x[flat] if x.ndim == 4 else x, state.cache)
        logits, cache = self.model.extend(params, token_BW.reshape(B * W, 1), cache, True)
        return state._replace(
            ids_BWS=ids_BWS,
            score_BW=score_BW,
            best=best,
            finished_BW=finished_BW,
            hopeful_B=hopeful_B,
            cache=cache,
            logits_BWV=logits.reshape(B, W, V),
            made=made,
        )


def _pick(x: jax.Array, which_Bn: jax.Array) -> jax.Array:
    """Of every row of `x` the entries named."""
    return x[jnp.arange(x.shape[0])[:, None], which_Bn]
