"""Prompts of any number and length through few compiled programs: buckets, and blocks between which the host looks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from jaxgpt.decoding.beam import Beams, BeamSearch, BeamState, Candidates, Found
from jaxgpt.decoding.policy import History, Policy
from jaxgpt.decoding.sampler import Model, Rows, SamplerState, advance, begin

BLOCK = 64  # tokens for which a cache grows at once

_compiled = 0
_lock = threading.Lock()


def compilations() -> int:
    """How many decoding programs this process has compiled so far."""
    return _compiled


def counted(f: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` that counts: the body of a function under jit runs once for every program that is made of it."""

    def traced(*args: Any) -> Any:
        global _compiled
        with _lock:
            _compiled += 1
        return f(*args)

    return jax.jit(traced, **options)


def bucket(n: int, least: int = 1, most: int = 0) -> int:
    """The power of two from n on, at least `least`; `most`, where that is nearer."""
    size = max(least, 1 << (n - 1).bit_length())
    return min(size, most) if n <= most else size


def align(prompts: Sequence[Sequence[int]], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as one array, rows aligned at their ends, both axes filled up to a bucket: ids `[B, P]`, starts `[B]`.

    Args:
        most: the context, which no bucket need exceed.
    """
    P = bucket(max(map(len, prompts)), 8, most)
    B = bucket(len(prompts))
    ids_BP, start_B = np.zeros((B, P), np.int32), np.full(B, P - 1, np.int32)
    for row, prompt in enumerate(prompts):
        ids_BP[row, P - len(prompt) :] = prompt
        start_B[row] = P - len(prompt)
    return ids_BP, start_B


def blocks(n: int) -> int:
    """Slots for n tokens."""
    return -(-n // BLOCK) * BLOCK


class Session:
    """One batch on its way. `more` makes tokens, `finish` ends a row before its time.

    Attributes:
        made: tokens made so far, in every row (those of a row that has ended mean nothing).
    """

    def __init__(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        keys: jax.Array,
        limits: Sequence[int],
        *,
        model: Model,
        policy: Policy,
        stop_ids: tuple[int, ...] = (),
        context: int = 0,
        slide: bool = False,
    ) -> None:
        """Nothing is computed yet.

        Args:
            params: the weights.
            prompts: ids, at least one a row; with `slide`, at most `context`.
            keys: one a row.
            limits: at most so many tokens, row by row.
            model: the functions.
            policy: how tokens are chosen.
            stop_ids: ids after which a row has ended.
            context: tokens that the model can see.
            slide: beyond the context, go on with the last `context` tokens.
        """
        ids_BP, start_B = align(prompts, context)
        B, self._prompt = ids_BP.shape
        fill = np.zeros(B - len(prompts), np.int32)
        rows = np.concatenate([np.arange(len(prompts)), fill])
        self._history = History(ids_BP, start_B, np.int32(self._prompt))  # type: ignore[arg-type]
        self._rows = Rows(keys[rows], np.concatenate([np.asarray(limits, np.int32), fill]))  # type: ignore[arg-type]
        self._size = self._prompt + blocks(max(limits))
        self._limit = max(limits)
        # The longest row fills the context first; from then on the window is the whole context.
        self._cached = max(context - max(map(len, prompts)) + 1, 1) if slide else self._limit
        self._params = params
        # What slides needs no cache beyond the context.
        slots = self._prompt + blocks(min(max(limits), context)) if slide else self._size
        self._begin, self._advance, self._slide = _programs(model, policy, stop_ids, self._size, slots, context)
        self._state: SamplerState | None = None
        self.made = 0

    def more(self, steps: int) -> np.ndarray:
        """Up to `steps` more tokens a row, int32 `[B, new]`; none where all rows have ended."""
        before = self.made
        if self._state is None:
            count = min(steps, self._limit, self._cached)
            self._state = self._begin(self._params, self._history, self._rows, np.int32(count - 1))
            self.made = int(self._state.made)
            if self.made < count:
                steps = self.made
        while (left := min(self._limit, before + steps) - self.made) > 0:
            cached = min(left, self._cached - self.made)
            program, count = (self._advance, cached) if cached > 0 else (self._slide, left)
            self._state = program(self._params, self._state, self._rows, np.int32(count))
            made = int(self._state.made)
            if made == self.made:
                break
            self.made = made
        ids_BS = np.array(self._state.history.ids_BS)  # a copy: the next call takes the buffer
        return ids_BS[:, self._prompt + before : self._prompt + self.made]

    def finish(self, rows: Sequence[int]) -> None:
        """These rows have ended."""
        assert self._state is not None
        done_B = np.array(self._state.done_B)
        done_B[list(rows)] = True
        self._state = self._state._replace(done_B=jax.device_put(done_B, self._state.done_B.sharding))


@lru_cache(maxsize=64)
def _programs(
    model: Model, policy: Policy, stop_ids: tuple[int, ...], size: int, slots: int, window: int
) -> tuple[Any, Any, Any]:
    go_on = partial(advance, model=model, policy=policy, stop_ids=stop_ids)

    def start(params: Any, history: History, rows: Rows, steps: jax.Array) -> SamplerState:
        # In one program with what follows, so that a text whose end alone is waited for costs one compilation.
        return go_on(params, begin(params, history, rows, size, slots, model, policy, stop_ids), rows, steps)

    return (
        counted(start),
        counted(go_on, donate_argnums=1),
        counted(partial(go_on, window=window), donate_argnums=1),
    )


def search(
    params: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    model: Model,
    policy: Policy,
    beams: Beams,
    stop_ids: tuple[int, ...],
    context: int,
    stopped: Callable[[Sequence[int]], bool] | None = None,
) -> Found:
    """Beam search for a batch of prompts; arrays of the host.

    Args:
        params: the weights.
        prompts: ids, at least one a row.
        limits: at most so many tokens, row by row.
        model: the functions.
        policy: as `BeamSearch` takes it.
        beams: how beams are kept and compared.
        stop_ids: ids that end a text.
        context: tokens that the model can see.
        stopped: whether new ids end a text by what they say. The host is asked of every candidate, so that the search is
            no longer one program on the device. None: nothing but ids ends a text.
    """
    ids_BP, start_B = align(prompts, context)
    B, P = ids_BP.shape
    limit_B = np.zeros(B, np.int32)
    limit_B[: len(limits)] = limits
    run, begin, advance = _beam_programs(BeamSearch(P + blocks(max(limits)), model, policy, beams, stop_ids))
    history = History(ids_BP, start_B, np.int32(P))  # type: ignore[arg-type]
    if stopped is None:
        return jax.device_get(run(params, history, limit_B))
    state, candidates, going = begin(params, history, limit_B)
    while going:
        made, ids_BKn = int(state.made) + 1, np.asarray(candidates.ids_BKn)
        stopped_BK = np.zeros(ids_BKn.shape[:2], bool)
        for row in np.flatnonzero(state.hopeful_B[: len(prompts)]):
            stopped_BK[row] = [stopped(ids_n[:made].tolist()) for ids_n in ids_BKn[row]]
        state, candidates, going = advance(params, state, candidates, stopped_BK)
    return jax.device_get(state.best)


@lru_cache(maxsize=64)
def _beam_programs(beam: BeamSearch) -> tuple[Any, Any, Any]:
    def then_look(step: Callable[..., BeamState]) -> Callable[..., tuple[BeamState, Candidates, jax.Array]]:
        def program(*args: Any) -> tuple[BeamState, Candidates, jax.Array]:
            state = step(*args)
            return state, beam.candidates(state), beam.open(state)

        return program

    return counted(beam.run), counted(then_look(beam.begin)), counted(then_look(beam.advance), donate_argnums=1)
