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


def left_pad(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[TokenBuffer, np.ndarray, int]:
    """Stack prompts, padded on the left, and repeat the last prompt to fill the batch.

    Returns the buffer, the index of the prompt of each row, and the number of slots for the whole text.
    """
    B, P, size = sizes(prompts, limits)
    prompt_B = np.minimum(np.arange(B), len(prompts) - 1)
    rows = [np.pad(prompts[i], (P - len(prompts[i]), 0), constant_values=NO_TOKEN) for i in prompt_B]
    return TokenBuffer(np.array(rows, np.int32), np.int32(P)), prompt_B, size  # type: ignore[arg-type]


def start(
    sampler: Sampler, params: Any, prompts: Sequence[Sequence[int]], keys: jax.Array, limits: Sequence[int]
) -> SamplerState:
    """Compute the cache of prompts, without their last tokens.

    Args:
        sampler: the model, and settings of generation.
        params: the weights.
        prompts: ids of each prompt, at least one.
        keys: one random key per prompt.
        limits: maximum number of new tokens of each prompt, for the text buffer size; the caller must end rows (`finish`).
    """
    assert len(keys) == len(prompts), (keys.shape, len(prompts))  # a check, because JAX clamps out-of-range indices
    text, prompt_B, size = left_pad(prompts, limits)
    return _compiled(prefill, sampler, static_argnames="size")(params, text, _rows(keys, prompt_B), size)


def run(sampler: Sampler, params: Any, state: SamplerState, steps: int) -> SamplerState:
    """Generate up to `steps` new tokens per row (prompt lookup: `steps + DRAFT`). The state is donated."""
    generate = lookup_steps if sampler.lookup else slide_steps if sampler.context else decode_steps
    return _compiled(generate, sampler, donate_argnames="state")(params, state, np.int32(steps))


def new_ids(state: SamplerState, since: int = 0) -> np.ndarray:
    """Return the new tokens at index `since` and later, int32 `[B, n]`.

    A stop id, a negative token (`NO_TOKEN` or `NOT_A_NUMBER`) or `finish` ends a row; later tokens are undefined.
    """
    end = int(state.text.length)
    ids_BS = np.array(state.text.ids_BS)  # a copy: the next call donates the buffer
    return ids_BS[:, end - int(state.made) + since : end]


def finish(state: SamplerState, rows: Sequence[int]) -> SamplerState:
    """Mark rows as finished, so that they generate no more tokens."""
    done_B = np.array(state.done_B)
    done_B[list(rows)] = True
    return state._replace(done_B=jax.device_put(done_B, state.done_B.sharding))


def shared(state: SamplerState, prompt: Sequence[int]) -> int:
    """Return the number of leading prompt tokens in a one-row cache; 0 if `resume` saves no computation."""
    cached = np.asarray(state.text.ids_BS)[0, _first(state) : int(state.cache.length)].tolist()
    differ = (i for i, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b)
    same = min(next(differ, min(len(cached), len(prompt))), len(prompt) - 1)
    return same if same > _again(same, prompt) else 0


def _first(state: SamplerState) -> int:
    """Return the slot of the first token of a one-row state."""
    return int(np.argmax(np.asarray(state.text.ids_BS)[0] >= 0))


def _again(same: int, prompt: Sequence[int]) -> int:
    """Return how many of the `same` cached tokens `resume` reads again, to round its first chunk up to a power of two."""
    rest = (len(prompt) - 1 - same) % CHUNK
    return round_up(rest) - rest if rest else 0


def resume(
    sampler: Sampler, params: Any, state: SamplerState, same: int, prompt: Sequence[int], key: jax.Array, limit: int
) -> SamplerState:
    """Start a prompt from a one-row state that caches its first `same` tokens (`shared`, above 0); donate the cache.

    As after `start`, the cache holds all tokens except the last; missing tokens are read in chunks of `CHUNK`, after a smaller
    first chunk. The text buffer has room for `limit` new tokens. The sampler must have no `context`: only then, a token has the
    same slot in text and cache.
    """
    cache, first, end = state.cache, _first(state), len(prompt) - 1
    begin = same - _again(same, prompt)
    size = first + sizes([prompt], [limit])[2]
    cache = cache if cache.size >= size else _grow(cache, size - cache.size)
    cache = cache._replace(length=jnp.int32(first + begin))
    while begin < end:
        count = (end - begin) % CHUNK or CHUNK
        ids_1T = np.asarray([prompt[begin : begin + count]], np.int32)
        cache = _compiled(_read, sampler, donate_argnames="cache")(params, cache, ids_1T)
        begin += count
    ids_1S = np.full((1, cache.size), NO_TOKEN, np.int32)
    ids_1S[0, first : first + len(prompt)] = prompt
    text = TokenBuffer(jnp.asarray(ids_1S), jnp.int32(first + len(prompt)))
    return SamplerState(text, cache, jnp.zeros(1, bool), jnp.int32(0), key[None])


def search(
    sampler: Sampler, beams: BeamParams, params: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> Hypotheses:
    """Run beam search on prompts, with at most `limits` new ids for each prompt; return host arrays."""
    text, prompt_B, size = left_pad(prompts, limits)
    limit_B = np.asarray(limits, np.int32)[prompt_B]
    return jax.device_get(_compiled(BeamSearch.run, BeamSearch(sampler, beams, size))(params, text, limit_B))


def _read(sampler: Sampler, params: Any, cache: Any, ids_1T: jax.Array) -> Any:
    return extend(sampler.model, params, ids_1T, cache)[1]


@lru_cache(maxsize=128)  # maximum number of jitted functions: XLA's CPU backend fails at a few hundred programs
def _compiled(function: Callable[..., Any], settings: Any, **jit: Any) -> Any:
    return jax.jit(partial(function, settings), **jit)


_rows = jax.jit(lambda keys, row_B: keys[row_B])
_grow = jax.jit(grow, static_argnums=1)
