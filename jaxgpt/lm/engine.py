"""Run any number of prompts of any length with few compiled programs, by rounding shapes up to buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from jaxgpt.config import BeamParams, SamplingParams
from jaxgpt.decoding.beam import BeamSearch, BeamState, Candidates, Hypotheses
from jaxgpt.decoding.lookup import lookup_steps
from jaxgpt.decoding.sampler import Model, RowLimits, SamplerState, decode_steps, prefill
from jaxgpt.decoding.sampling import TokenBuffer

BLOCK = 64  # slots for new tokens are a multiple of this


def bucket(n: int, least: int = 1, most: int = 0) -> int:
    """Round n up to a power of two, at least `least`, or to `most` if that is smaller."""
    size = max(least, 1 << (n - 1).bit_length())
    return min(size, most) if n <= most else size


def left_pad(prompts: Sequence[Sequence[int]], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Stack prompts, padded on the left, with both axes rounded up to a bucket: ids `[B, P]`, starts `[B]`.

    Args:
        prompts: ids, at least one per row.
        most: the context length, an upper bound of the bucket.
    """
    P = bucket(max(map(len, prompts)), 8, most)
    B = bucket(len(prompts))
    ids_BP, start_B = np.zeros((B, P), np.int32), np.full(B, P - 1, np.int32)
    for row, prompt in enumerate(prompts):
        ids_BP[row, P - len(prompt) :] = prompt
        start_B[row] = P - len(prompt)
    return ids_BP, start_B


def blocks(n: int) -> int:
    """Round n up to a multiple of `BLOCK`."""
    return -(-n // BLOCK) * BLOCK


def cache_shape(prompts: Sequence[Sequence[int]], limits: Sequence[int], context: int, slide: bool) -> tuple[int, int]:
    """Return the rows and slots of the cache for a batch. A sliding window needs no slots beyond the context."""
    new = min(max(limits), context) if slide else max(limits)
    return bucket(len(prompts)), bucket(max(map(len, prompts)), 8, context) + blocks(new)


class DecodeSession:
    """Generation of one batch. `next_tokens` generates, `finish` ends rows early.

    Attributes:
        made: number of tokens generated so far per row; tokens after the end of a row are undefined.
    """

    def __init__(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        keys: jax.Array,
        limits: Sequence[int],
        *,
        model: Model,
        sampling: SamplingParams,
        stop_ids: tuple[int, ...] = (),
        context: int = 0,
        slide: bool = False,
        lookup: int = 0,
    ) -> None:
        """Prepare a batch; nothing is computed yet.

        Args:
            params: the weights.
            prompts: ids, at least one per row; with `slide`, at most `context`.
            keys: one key per row.
            limits: the maximum number of new tokens of each row.
            model: the model's functions.
            sampling: sampling parameters.
            stop_ids: ids that end a row.
            context: the model's context length in tokens.
            slide: beyond the context, continue from the last `context` tokens.
            lookup: draft tokens by prompt lookup with n-grams of this length; one prompt only, without `slide`. 0 disables.
        """
        assert len(keys) == len(prompts) == len(limits), (keys.shape, len(prompts), len(limits))  # JAX would clamp
        ids_BP, start_B = left_pad(prompts, context)
        B, self._prompt = ids_BP.shape
        fill = np.zeros(B - len(prompts), np.int32)
        rows = np.concatenate([np.arange(len(prompts)), fill])
        self._text = TokenBuffer(ids_BP, start_B, np.int32(self._prompt))  # type: ignore[arg-type]
        self._rows = RowLimits(keys[rows], np.concatenate([np.asarray(limits, np.int32), fill]))  # type: ignore[arg-type]
        self._size = self._prompt + blocks(max(limits))
        self._limit = max(limits)
        # The longest row fills the context first; after that, the window is the whole context.
        self._cached = max(context - max(map(len, prompts)) + 1, 1) if slide else self._limit
        self._params = params
        _, slots = cache_shape(prompts, limits, context, slide)
        self._start, self._steps, self._slide = _programs(model, sampling, stop_ids, self._size, slots, context, lookup)
        self._state: SamplerState | None = None
        self.made = 0

    def next_tokens(self, steps: int) -> np.ndarray:
        """Generate up to `steps` more tokens per row, int32 `[B, new]`, or none if all rows have ended.

        With `lookup`, a few more than `steps` are possible.

        A row ends at a negative token: `sampling.NO_TOKEN` or `NOT_A_NUMBER`.
        """
        before = self.made
        if self._state is None:
            count = min(steps, self._limit, self._cached)
            self._state = self._start(self._params, self._text, self._rows, np.int32(count - 1))
            self.made = int(self._state.made)
            if self.made < count:
                steps = self.made
        while (left := min(self._limit, before + steps) - self.made) > 0:
            cached = min(left, self._cached - self.made)
            program, count = (self._steps, cached) if cached > 0 else (self._slide, left)
            self._state = program(self._params, self._state, self._rows, np.int32(count))
            made = int(self._state.made)
            if made == self.made:
                break
            self.made = made
        ids_BS = np.array(self._state.text.ids_BS)  # a copy: the next call donates the buffer
        return ids_BS[:, self._prompt + before : self._prompt + self.made]

    def finish(self, rows: Sequence[int]) -> None:
        """End these rows."""
        assert self._state is not None
        done_B = np.array(self._state.done_B)
        done_B[list(rows)] = True
        self._state = self._state._replace(done_B=jax.device_put(done_B, self._state.done_B.sharding))


@lru_cache(maxsize=64)
def _programs(
    model: Model, sampling: SamplingParams, stop_ids: tuple[int, ...], size: int, slots: int, window: int, lookup: int
) -> tuple[Any, Any, Any]:
    plain = partial(decode_steps, model=model, sampling=sampling, stop_ids=stop_ids)
    go_on = partial(lookup_steps, model=model, sampling=sampling, stop_ids=stop_ids, ngram=lookup) if lookup else plain

    def start(params: Any, text: TokenBuffer, rows: RowLimits, steps: jax.Array) -> SamplerState:
        # Prefill and decode steps are one program, so that generation without streaming needs one compilation.
        return go_on(params, prefill(params, text, rows, size, slots, model, sampling, stop_ids), rows, steps)

    return (
        jax.jit(start),
        jax.jit(go_on, donate_argnums=1),
        jax.jit(partial(plain, window=window), donate_argnums=1),
    )


def search(
    params: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    model: Model,
    sampling: SamplingParams,
    beams: BeamParams,
    stop_ids: tuple[int, ...],
    context: int,
    stopped: Callable[[int, Sequence[int]], bool] | None = None,
) -> Hypotheses:
    """Run beam search over a batch of prompts; returns host arrays.

    Args:
        params: the weights.
        prompts: ids, at least one per row.
        limits: the maximum number of new tokens of each row.
        model: the model's functions.
        sampling: as in `BeamSearch`.
        beams: beam search parameters.
        stop_ids: ids that end a sequence.
        context: the model's context length in tokens.
        stopped: called with a row and its new ids; returns whether they end with a stop string. The host then checks every
            candidate, and the search is no longer a single program on the device. None: no stop strings.
    """
    ids_BP, start_B = left_pad(prompts, context)
    B, P = ids_BP.shape
    limit_B = np.zeros(B, np.int32)
    limit_B[: len(limits)] = limits
    run, start, step = _beam_programs(BeamSearch(P + blocks(max(limits)), model, sampling, beams, stop_ids))
    text = TokenBuffer(ids_BP, start_B, np.int32(P))  # type: ignore[arg-type]
    if stopped is None:
        return jax.device_get(run(params, text, limit_B))
    state, candidates, going = start(params, text, limit_B)
    while going:
        made, ids_BKn = int(state.made) + 1, np.asarray(candidates.ids_BKn)
        stopped_BK = np.zeros(ids_BKn.shape[:2], bool)
        for row in np.flatnonzero(state.active_B[: len(prompts)]):
            stopped_BK[row] = [stopped(int(row), ids_n[:made].tolist()) for ids_n in ids_BKn[row]]
        state, candidates, going = step(params, state, candidates, stopped_BK)
    return jax.device_get(state.best)


@lru_cache(maxsize=64)
def _beam_programs(beam: BeamSearch) -> tuple[Any, Any, Any]:
    def then_look(step: Callable[..., BeamState]) -> Callable[..., tuple[BeamState, Candidates, jax.Array]]:
        def program(*args: Any) -> tuple[BeamState, Candidates, jax.Array]:
            state = step(*args)
            return state, beam.candidates(state), beam.open(state)

        return program

    return jax.jit(beam.run), jax.jit(then_look(beam.prefill)), jax.jit(then_look(beam.step), donate_argnums=1)
