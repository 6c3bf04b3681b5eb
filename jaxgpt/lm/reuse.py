"""Reuse of a KV cache: continue an earlier text with a prompt that begins with the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.decoding.sampler import Sampler, SamplerState, extend
from jaxgpt.lm.buffers import round_up
from jaxgpt.lm.engine import jitted, resize_keys
from jaxgpt.model.cache import KVCache, grow
from jaxgpt.ops.attention import NO_TOKEN
from jaxgpt.parallel.arrays import to_host

CHUNK = 512  # maximum number of tokens that `resume` adds to a cache in one call


class Reuse(NamedTuple):
    """A plan to reuse the cache of an earlier one-row text, for a prompt that begins with the same tokens.

    Attributes:
        state: the state after the text.
        tokens: number of leading tokens of the prompt in the cache; the last token of the prompt is not counted.
        kept: number of these tokens that stay in the cache; the others are read again.
        padding: number of slots before the first token of the text, and of the prompt.
        size: number of slots of the cache for the prompt and its new tokens.
    """

    state: SamplerState
    tokens: int
    kept: int
    padding: int
    size: int


def plan_reuse(state: SamplerState, prompt: Sequence[int], limit: int) -> Reuse | None:
    """Return a plan to continue a one-row state with a prompt (`resume`); None: no token of the cache can be kept.

    Args:
        state: the state after an earlier text.
        prompt: ids of the prompt.
        limit: maximum number of new tokens.
    """
    ids_S = to_host(state.text.ids_BS)[0]
    padding = int(np.argmax(ids_S >= 0))
    cached = ids_S[padding : int(state.cache.length)]
    needed = np.asarray(prompt[:-1])
    tokens = _common_prefix(cached, needed)
    kept = _kept_tokens(tokens, len(needed))
    if kept <= 0:
        return None
    size = _grown_size(int(state.cache.size), padding + len(prompt) + limit)
    return Reuse(state, tokens, kept, padding, size)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two texts."""
    n = min(len(a), len(b))
    is_equal = a[:n] == b[:n]
    return int(np.cumprod(is_equal).sum())


def _kept_tokens(reusable: int, needed: int) -> int:
    """Return the number of `reusable` cached tokens that `resume` keeps; it reads the remainder of the `needed` tokens.

    Reading some tokens again rounds the size of the last chunk up to a power of two. The result is negative if rounding
    up takes more tokens than are reusable.

    Example: of 10 needed tokens, 7 are reusable and 3 are missing. To read a chunk of 4, the cache keeps 6.
    """
    last_chunk = (needed - reusable) % CHUNK
    if last_chunk == 0:
        return reusable
    return reusable - (round_up(last_chunk) - last_chunk)


def _grown_size(size: int, needed: int) -> int:
    """Return the number of slots, at least `needed`, after a cache of `size` slots has grown; unchanged if large enough."""
    if needed <= size:
        return size
    # Use few different sizes, because each compiles a program. At most 63 slots, or a quarter of the slots, are unused.
    step = max(round_up(needed) // 8, 64)
    return math.ceil(needed / step) * step


def resume(sampler: Sampler, params: Any, reuse: Reuse, prompt: Sequence[int], key: jax.Array) -> SamplerState:
    """Start a prompt from a one-row state that caches its first tokens; donate the cache.

    As after `engine.start`, the cache holds all tokens except the last, and the text buffer has room for the new tokens.
    Missing tokens are read in chunks. The sampler must have no `context`: only then does a token have the same slot in text
    and cache.

    Args:
        sampler: the model, and settings of generation.
        params: the weights.
        reuse: result of `plan_reuse` for the prompt.
        prompt: ids of the prompt.
        key: random key of the prompt.
    """
    cache = reuse.state.cache
    if reuse.size > cache.size:
        cache = _grow(cache, reuse.size - cache.size)

    # Drop the cached tokens after the first `kept` tokens, then read the remainder of the prompt.
    cache = cache._replace(length=np.int32(reuse.padding + reuse.kept))  # type: ignore[arg-type]
    read = jitted(_read, sampler, donate_argnames="cache")
    needed = len(prompt) - 1
    for begin in range(reuse.kept, needed, CHUNK):
        chunk = prompt[begin : min(begin + CHUNK, needed)]
        cache = read(params, cache, np.asarray([chunk], np.int32))

    # The prompt begins at the same slot as the earlier text.
    ids_1S = np.full((1, cache.size), NO_TOKEN, np.int32)
    length = reuse.padding + len(prompt)
    ids_1S[0, reuse.padding : length] = prompt

    # The arrays are on the host, because `jnp` would put them on one device, and the mesh may have devices of other processes.
    text: Any = TokenBuffer(ids_1S, np.int32(length))  # type: ignore[arg-type]
    done_1: Any = np.zeros(1, bool)
    made: Any = np.int32(0)
    log_p_1S: Any = np.zeros(ids_1S.shape, np.float32)
    return SamplerState(text, cache, done_1, made, resize_keys(key, 1), log_p_1S)


def _read(sampler: Sampler, params: Any, cache: KVCache, ids_1T: jax.Array) -> KVCache:
    """Add tokens to a cache."""
    _, cache = extend(sampler.model, params, ids_1T, cache)
    return cache


_grow = jax.jit(grow, static_argnums=1)
