"""Run any prompts with few compiled programs, by rounding shapes up to buckets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import BeamParams
from jaxgpt.decoding.beam import BeamSearch, Hypotheses
from jaxgpt.decoding.lookup import lookup_steps
from jaxgpt.decoding.sampler import Rows, Sampler, SamplerState, decode_steps, prefill
from jaxgpt.decoding.sampling import TokenBuffer
from jaxgpt.model.cache import grow

BLOCK = 64  # the number of slots for new tokens is rounded up to a multiple of this
LEAST_SLOTS = 256  # minimum number of cache slots of a chat; the cache grows by doubling, and each size is compiled
CHUNK = 512  # maximum number of prompt tokens added to a cache in one call


def bucket(n: int, least: int = 1, most: int = 0) -> int:
    """Round n up to a power of two, at least `least`, or to `most` if `most` is smaller."""
    size = max(least, 1 << (n - 1).bit_length())
    return min(size, most) if n <= most else size


def left_pad(prompts: Sequence[Sequence[int]], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Stack prompts, padded on the left to bucket sizes of at most `most`: ids `[B, P]`, starts `[B]`."""
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


def cache_slots(prompts: Sequence[Sequence[int]], limit: int, context: int, slide: bool) -> int:
    """Return the number of cache slots for a batch. A sliding window keeps at most `context` new tokens."""
    longest = max(map(len, prompts))
    if slide and longest > context:
        return context
    return bucket(longest, 8, context) + blocks(min(limit, context) if slide else limit)


def cached_ids(state: SamplerState) -> list[int]:
    """Return the ids in the cache of a state of one row."""
    start, length = int(state.text.start_B[0]), int(state.cache.length)
    return np.asarray(state.text.ids_BS)[0, start:length].tolist()


class DecodeSession:
    """Generates one batch. `next_tokens` generates, `finish` ends rows early.

    Attributes:
        made: number of tokens generated so far per row; tokens after the end of a row are undefined.
        reused: number of tokens of the prompt with keys and values cached in an earlier session.
    """

    def __init__(
        self,
        sampler: Sampler,
        params: Any,
        prompts: Sequence[Sequence[int]],
        keys: jax.Array,
        limits: Sequence[int],
        *,
        context: int = 0,
        slide: bool = False,
        lookup: int = 0,
        before: SamplerState | None = None,
    ) -> None:
        """Prepare a batch; without `before`, nothing is computed yet.

        Args:
            prompts: ids, at least one per row.
            keys: one key per row.
            limits: the maximum number of new tokens of each row.
            context: the model's context length in tokens.
            slide: beyond the context, continue from the last `context` tokens.
            lookup: draft tokens by prompt lookup with n-grams of this length, for one prompt without `slide`; 0: off.
            before: the end of an earlier session, donated; cached tokens shared with the prompt are not computed again.
        """
        assert len(keys) == len(prompts) == len(limits), (keys.shape, len(prompts), len(limits))  # JAX clamps indices
        ids_BP, start_B = left_pad(prompts, context)
        B, self._prompt = ids_BP.shape
        fill = (0, B - len(prompts))  # rows without new tokens
        self._text = TokenBuffer(ids_BP, start_B, np.int32(self._prompt))  # type: ignore[arg-type]
        key_B, limit_B = keys[np.pad(np.arange(len(prompts)), fill)], np.pad(np.asarray(limits, np.int32), fill)
        self._rows = Rows(key_B, limit_B)  # type: ignore[arg-type]
        self._limit = max(limits)
        # The longest row fills the context first; after that, the window is the whole context.
        self._cached = max(context - max(map(len, prompts)) + 1, 1) if slide else self._limit
        self._params, self._context, self.made, self.reused = params, context, 0, 0
        slots = cache_slots(prompts, self._limit, context, slide)
        self._programs = _programs(sampler, self._prompt + blocks(max(limits)), slots, context, lookup)
        self._state = None if before is None else self._extend_prefix(before, prompts[0])

    def next_tokens(self, steps: int) -> np.ndarray:
        """Generate up to `steps` more tokens per row, int32 `[B, new]`, or none if all rows have ended.

        With `lookup`, a few more tokens may be generated. A row ends at a negative token: `sampling.ALL_REMOVED` or
        `NOT_A_NUMBER`.
        """
        before, end = self.made, min(self._limit, self.made + steps)
        while (made := self.made) < end:
            cached = self._cached - made
            count = min(end - made, cached) if cached > 0 else end - made
            if self._state is None:
                self._state = self._programs.start(self._params, self._text, self._rows, np.int32(count - 1))
            else:
                state, self._state = self._state, None  # donated
                program = self._programs.steps if cached > 0 else self._programs.slide
                self._state = program(self._params, state, self._rows, np.int32(count))
            self.made = int(self._state.made)
            if self.made < made + count:  # end of all rows
                break
        assert self._state is not None
        ids_BS = np.array(self._state.text.ids_BS)  # a copy: the next call donates the buffer
        return ids_BS[:, self._prompt + before : self._prompt + self.made]

    def finish(self, rows: Sequence[int]) -> None:
        """End these rows."""
        assert self._state is not None
        done_B = np.array(self._state.done_B)
        done_B[list(rows)] = True
        self._state = self._state._replace(done_B=jax.device_put(done_B, self._state.done_B.sharding))

    def end(self) -> SamplerState | None:
        """End this session; return its state, which a new one-row session can extend, or None after a failed call."""
        state, self._state = self._state, None
        return state

    def _extend_prefix(self, before: SamplerState, prompt: Sequence[int]) -> SamplerState | None:
        """Keep the cached tokens shared with an earlier text and add the remaining tokens; None if no token is shared."""
        ids, cache, start = cached_ids(before), before.cache, int(before.text.start_B[0])
        same = (i for i, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b)
        self.reused = done = min(next(same, min(len(ids), len(prompt))), len(prompt) - 1)
        if not done:
            return None
        slots = bucket(start + len(prompt) + self._limit, LEAST_SLOTS)
        cache = cache if cache.size >= slots else _grow(cache, slots - cache.size)
        while (left := len(prompt) - 1 - done) > 0:
            # Keep the chunk within the context: positions are also looked up for its padding.
            T = bucket(min(left, CHUNK), 8, min(CHUNK, cache.size - start - done, max(self._context - done, left)))
            new = prompt[done : done + T][:left]
            ids_1T = np.zeros((1, T), np.int32)
            ids_1T[0, : len(new)] = new
            cache = cache._replace(length=jnp.int32(start + done))
            cache = self._programs.read(self._params, cache, ids_1T, np.int32(len(new)))
            done += len(new)
        ids_1S = np.zeros((1, cache.size + 1), np.int32)
        ids_1S[0, start : start + len(prompt)] = prompt
        self._prompt = start + len(prompt)
        text = TokenBuffer(jnp.asarray(ids_1S), before.text.start_B, jnp.int32(self._prompt))
        return SamplerState(text, cache._replace(length=jnp.int32(start + done)), jnp.zeros((1,), bool), jnp.int32(0))


class Programs(NamedTuple):
    """The compiled functions of a sampler: prefill, decode, sliding window, extend a cache."""

    start: Any
    steps: Any
    slide: Any
    read: Any


@lru_cache(maxsize=64)
def _programs(sampler: Sampler, size: int, slots: int, window: int, lookup: int) -> Programs:
    plain = partial(decode_steps, sampler)
    go_on = partial(lookup_steps, sampler, ngram=lookup) if lookup else plain

    def start(params: Any, text: TokenBuffer, rows: Rows, steps: jax.Array) -> SamplerState:
        # Prefill and decode steps are one program, so that generation without streaming needs one compilation.
        return go_on(params, prefill(sampler, params, text, rows, size, slots), rows, steps)

    def read(params: Any, cache: Any, ids_1T: jax.Array, count: jax.Array) -> Any:
        # Ids beyond `count` are padding: masked until later tokens overwrite them.
        return sampler.model.extend(params, ids_1T, cache, True)[1]._replace(length=cache.length + count)

    once = partial(jax.jit, donate_argnums=1)
    return Programs(jax.jit(start), once(go_on), once(partial(plain, window=window)), once(read))


_grow = jax.jit(grow, static_argnums=1)


def search(
    sampler: Sampler,
    beams: BeamParams,
    params: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    context: int,
) -> Hypotheses:
    """Run beam search on a batch, with the arguments of a `DecodeSession`; return host arrays."""
    ids_BP, start_B = left_pad(prompts, context)
    B, P = ids_BP.shape
    limit_B = np.pad(np.asarray(limits, np.int32), (0, B - len(limits)))
    text = TokenBuffer(ids_BP, start_B, np.int32(P))  # type: ignore[arg-type]
    return jax.device_get(_search(BeamSearch(sampler, beams, P + blocks(max(limits))), params, text, limit_B))


_search = jax.jit(BeamSearch.run, static_argnums=0)
