"""Run the sampler on any prompts with few compiled programs: numbers of rows and slots are rounded up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import BeamParams
from jaxgpt.decoding.beam import BeamSearch, Hypotheses
from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.decoding.lookup import lookup_steps
from jaxgpt.decoding.sampler import Sampler, SamplerState, decode_steps, extend, prefill, slide_steps
from jaxgpt.model.cache import grow
from jaxgpt.ops.attention import NO_TOKEN

CHUNK = 512  # maximum number of tokens that `resume` adds to a cache in one call


def round_up(n: int, least: int = 1) -> int:
    """Round n up to a power of two, at least `least`."""
    return max(least, 1 << (n - 1).bit_length())


def sizes(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[int, int, int]:
    """Return the number of rows, of slots for a prompt and of slots for the whole text."""
    P = round_up(max(map(len, prompts)) - 1, 8) + 1  # `prefill` reads all tokens of a prompt except the last
    return round_up(len(prompts)), P, P + round_up(max(limits), 64)


def left_pad(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[TokenBuffer, int]:
    """Stack prompts, padded on the left; further rows are empty. Return the buffer and the slots for the whole text."""
    B, P, size = sizes(prompts, limits)
    ids_BP = np.full((B, P), NO_TOKEN, np.int32)
    for row, ids in enumerate(prompts):
        ids_BP[row, P - len(ids) :] = ids
    return TokenBuffer(ids_BP, np.int32(P)), size  # type: ignore[arg-type]


def start(
    sampler: Sampler, params: Any, prompts: Sequence[Sequence[int]], keys: jax.Array, limits: Sequence[int]
) -> SamplerState:
    """Compute the cache of prompts, without their last tokens.

    Args:
        sampler: the model, and settings of generation.
        params: the weights.
        prompts: ids of each prompt, at least one.
        keys: one random key per prompt.
        limits: maximum number of new tokens of each prompt, for the text buffer size; rows do not end at their limits.
    """
    text, size = left_pad(prompts, limits)
    assert len(keys) == len(prompts), (keys.shape, len(prompts))  # a check, because `_resize` repeats keys
    key_B = _resize(keys, len(text.ids_BS))
    return _compiled(prefill, sampler, static_argnames="size")(params, text, key_B, size)


def run(sampler: Sampler, params: Any, state: SamplerState, steps: int) -> SamplerState:
    """Generate up to `steps` new tokens per row (prompt lookup: `steps + DRAFT`). The state is donated."""
    generate = lookup_steps if sampler.lookup else slide_steps if sampler.context else decode_steps
    return _compiled(generate, sampler, donate_argnames="state")(params, state, np.int32(steps))


def new_ids(state: SamplerState, since: int = 0) -> np.ndarray:
    """Return the new tokens at index `since` and later, int32 `[B, n]`.

    A stop id or a negative token (`NO_TOKEN` or `NOT_A_NUMBER`) ends a row; later tokens are undefined.
    """
    return _new(state.text.ids_BS, state, since)


def new_log_p(state: SamplerState, since: int = 0) -> np.ndarray:
    """Return the log probabilities of `new_ids`, float32 `[B, n]`."""
    return _new(state.log_p_BS, state, since)


def _new(x_BS: jax.Array, state: SamplerState, since: int) -> np.ndarray:
    end = int(state.text.length)
    return np.array(x_BS)[:, end - int(state.made) + since : end]  # a copy: the next call donates the buffers


def shared(state: SamplerState, prompt: Sequence[int]) -> int:
    """Return how many leading prompt tokens, except the last, a one-row cache holds; 0 if `resume` would read all again."""
    cached = np.asarray(state.text.ids_BS)[0, _first(state) : int(state.cache.length)]
    n = min(len(cached), len(prompt) - 1)
    same = int(np.cumprod(cached[:n] == np.asarray(prompt[:n])).sum())
    return same if _begin(same, len(prompt) - 1) > 0 else 0


def _first(state: SamplerState) -> int:
    """Return the slot of the first token of a one-row state."""
    return int(np.argmax(np.asarray(state.text.ids_BS)[0] >= 0))


def _begin(same: int, end: int) -> int:
    """Return the first token that `resume` reads: before `same`, to round the size of its last chunk up to a power of two."""
    rest = (end - same) % CHUNK
    return same - (round_up(rest) - rest) if rest else same


def resumed_size(state: SamplerState, prompt: Sequence[int], limit: int) -> int:
    """Return the number of slots of the cache after `resume`."""
    needed = _first(state) + len(prompt) + limit
    if needed <= state.cache.size:
        return int(state.cache.size)
    # Few different sizes, each of which compiles a program, with at most a quarter of the slots unused.
    step = max(round_up(needed) // 8, 64)
    return -(-needed // step) * step


def resume(
    sampler: Sampler, params: Any, state: SamplerState, same: int, prompt: Sequence[int], key: jax.Array, limit: int
) -> SamplerState:
    """Start a prompt from a one-row state that caches its first `same` tokens (`shared`, above 0); donate the cache.

    As after `start`, the cache holds all tokens except the last, and the text buffer has room for `limit` new tokens. Missing
    tokens are read in chunks. The sampler must have no `context`: only then, a token has the same slot in text and cache.
    """
    cache = state.cache
    first = _first(state)
    end = len(prompt) - 1
    begin = _begin(same, end)
    size = resumed_size(state, prompt, limit)
    if size > cache.size:
        cache = _grow(cache, size - cache.size)
    cache = cache._replace(length=jnp.int32(first + begin))
    for at in range(begin, end, CHUNK):
        ids_1T = np.asarray([prompt[at : min(at + CHUNK, end)]], np.int32)
        cache = _compiled(_read, sampler, donate_argnames="cache")(params, cache, ids_1T)
    ids_1S = np.full((1, cache.size), NO_TOKEN, np.int32)
    ids_1S[0, first : first + len(prompt)] = prompt
    text = TokenBuffer(jnp.asarray(ids_1S), jnp.int32(first + len(prompt)))
    log_p_1S = jnp.zeros(ids_1S.shape, jnp.float32)
    return SamplerState(text, cache, jnp.zeros(1, bool), jnp.int32(0), key[None], log_p_1S)


def search(
    sampler: Sampler, beams: BeamParams, params: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> Hypotheses:
    """Run beam search on prompts, with at most `limits` new ids for each prompt; return host arrays."""
    text, size = left_pad(prompts, limits)
    limit_B = np.pad(np.asarray(limits, np.int32), (0, len(text.ids_BS) - len(limits)))
    return jax.device_get(_compiled(BeamSearch.run, BeamSearch(sampler, beams, size))(params, text, limit_B))


def _read(sampler: Sampler, params: Any, cache: Any, ids_1T: jax.Array) -> Any:
    return extend(sampler.model, params, ids_1T, cache)[1]


@lru_cache(maxsize=128)  # maximum number of jitted functions: XLA's CPU backend fails at a few hundred programs
def _compiled(function: Callable[..., Any], settings: Any, **jit: Any) -> Any:
    return jax.jit(partial(function, settings), **jit)


_resize = jax.jit(jnp.resize, static_argnums=1)
_grow = jax.jit(grow, static_argnums=1)
