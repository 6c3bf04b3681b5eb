"""Run the sampler on any prompts with few compiled programs: numbers of rows and slots are rounded up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import BeamParams
from jaxgpt.decoding.beam import BeamSearch, Hypotheses
from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.decoding.lookup import lookup_steps
from jaxgpt.decoding.sampler import Sampler, SamplerState, decode_steps, extend, prefill, slide_steps
from jaxgpt.model.cache import KVCache, grow
from jaxgpt.ops.attention import NO_TOKEN
from jaxgpt.parallel.arrays import to_host

CHUNK = 512  # maximum number of tokens that `resume` adds to a cache in one call


def round_up(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least n and at least `least`."""
    return 1 << (max(n, least) - 1).bit_length()


class BufferSizes(NamedTuple):
    """Sizes of the token buffer of a text, rounded up so that prompts of similar sizes share a compiled program.

    Attributes:
        rows: number of rows.
        prompt: slots of a row for its prompt.
        text: slots of a row for the prompt and the new tokens.
    """

    rows: int
    prompt: int
    text: int


def buffer_sizes(prompts: Sequence[Sequence[int]], limits: Sequence[int], ways: int = 1) -> BufferSizes:
    """Return the sizes of the buffer for prompts, and for at most `limits` new tokens of each.

    If there is more than one row, their number is a multiple of `ways`, the number of shards of a batch.
    """
    longest = max(len(prompt) for prompt in prompts)
    rows = round_up(len(prompts))
    if rows > 1:
        rows = math.ceil(rows / ways) * ways
    prompt_slots = round_up(longest - 1, 8) + 1  # `prefill` reads all tokens of a prompt except the last
    new_slots = round_up(max(limits), 64)
    return BufferSizes(rows=rows, prompt=prompt_slots, text=prompt_slots + new_slots)


def left_pad(prompts: Sequence[Sequence[int]], limits: Sequence[int], ways: int = 1) -> tuple[TokenBuffer, int]:
    """Stack prompts, padded on the left; further rows are empty. Return the buffer and the slots of a complete row."""
    sizes = buffer_sizes(prompts, limits, ways)
    P = sizes.prompt
    ids_BP = np.full((sizes.rows, P), NO_TOKEN, np.int32)
    for row, ids in enumerate(prompts):
        ids_BP[row, P - len(ids) :] = ids
    return TokenBuffer(ids_BP, np.int32(P)), sizes.text  # type: ignore[arg-type]


def start(
    sampler: Sampler,
    params: Any,
    prompts: Sequence[Sequence[int]],
    keys: jax.Array,
    limits: Sequence[int],
    ways: int = 1,
) -> SamplerState:
    """Compute the cache of prompts, without their last tokens.

    Args:
        sampler: the model, and settings of generation.
        params: the weights.
        prompts: ids of each prompt, at least one.
        keys: one random key per prompt.
        limits: maximum number of new tokens of each prompt, for the text buffer size; rows do not end at their limits.
        ways: number of shards of a batch, as in `buffer_sizes`.
    """
    assert len(keys) == len(prompts), (keys.shape, len(prompts))  # `_resize` would silently repeat missing keys
    text, size = left_pad(prompts, limits, ways)
    key_B = _resize(keys, len(text.ids_BS))
    compiled = _compiled(prefill, sampler, static_argnames="size")
    return compiled(params, text, key_B, size)


def run(sampler: Sampler, params: Any, state: SamplerState, steps: int) -> SamplerState:
    """Generate up to `steps` new tokens per row (prompt lookup: `steps + DRAFT`). The state is donated."""
    if sampler.lookup:
        generate = lookup_steps
    elif sampler.context:
        generate = slide_steps
    else:
        generate = decode_steps
    compiled = _compiled(generate, sampler, donate_argnames="state")
    return compiled(params, state, np.int32(steps))


def new_ids(state: SamplerState, since: int = 0) -> np.ndarray:
    """Return the new tokens at index `since` and later, int32 `[B, n]`.

    A stop id or a negative token (`NO_TOKEN` or `NOT_A_NUMBER`) ends a row; later tokens are undefined.
    """
    return _new(state.text.ids_BS, state, since)


def new_log_p(state: SamplerState, since: int = 0) -> np.ndarray:
    """Return the log probabilities of `new_ids`, float32 `[B, n]`."""
    return _new(state.log_p_BS, state, since)


def _new(x_BS: jax.Array, state: SamplerState, since: int) -> np.ndarray:
    """Return the slots of the new tokens at index `since` and later."""
    end = int(state.text.length)
    return to_host(x_BS)[:, end - int(state.made) + since : end]  # a copy: the next call donates the buffers


class Reuse(NamedTuple):
    """A plan to reuse the cache of an earlier one-row text, for a prompt that begins with the same tokens.

    Attributes:
        state: the state after the text.
        tokens: number of leading tokens of the prompt, except the last, in the cache.
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
    """Plan how `resume` continues a one-row state with a prompt; None: it can keep no token in the cache.

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
    return -(-needed // step) * step


def resume(sampler: Sampler, params: Any, reuse: Reuse, prompt: Sequence[int], key: jax.Array) -> SamplerState:
    """Start a prompt from a one-row state that caches its first tokens; donate the cache.

    As after `start`, the cache holds all tokens except the last, and the text buffer has room for the new tokens. Missing
    tokens are read in chunks. The sampler must have no `context`: only then does a token have the same slot in text and cache.

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
    read = _compiled(_read, sampler, donate_argnames="cache")
    needed = len(prompt) - 1
    for start_of_chunk in range(reuse.kept, needed, CHUNK):
        chunk = prompt[start_of_chunk : min(start_of_chunk + CHUNK, needed)]
        cache = read(params, cache, np.asarray([chunk], np.int32))

    # The prompt begins at the same slot as the earlier text.
    ids_1S = np.full((1, cache.size), NO_TOKEN, np.int32)
    length = reuse.padding + len(prompt)
    ids_1S[0, reuse.padding : length] = prompt

    # The arrays are on the host, because `jnp` would put them on one device, and the mesh may have devices of other processes.
    text: Any = TokenBuffer(ids_1S, np.int32(length))  # type: ignore[arg-type]
    done_B: Any = np.zeros(1, bool)
    made: Any = np.int32(0)
    log_p_BS: Any = np.zeros(ids_1S.shape, np.float32)
    return SamplerState(text, cache, done_B, made, _resize(key, 1), log_p_BS)


class BeamText(NamedTuple):
    """A finished text of beam search.

    Attributes:
        ids: the new ids, including a stop id.
        score: `log p / length ** length_penalty`; NaN if a logit is NaN.
    """

    ids: list[int]
    score: float


def search(
    sampler: Sampler,
    beams: BeamParams,
    params: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ways: int = 1,
) -> list[list[BeamText]]:
    """Run beam search on prompts, with at most `limits` new ids for each; return the texts of each prompt, best first."""
    text, size = left_pad(prompts, limits, ways)
    padding_rows = len(text.ids_BS) - len(limits)
    limit_B = np.pad(np.asarray(limits, np.int32), (0, padding_rows))
    compiled = _compiled(BeamSearch.run, BeamSearch(sampler, beams, size))
    found: Hypotheses = jax.tree.map(to_host, compiled(params, text, limit_B))

    P = text.ids_BS.shape[1]
    texts = []
    for row in range(len(prompts)):
        beams_of_row = zip(found.ids_BWS[row], found.length_BW[row], found.score_BW[row], strict=True)
        texts.append([BeamText(ids_S[P : P + n].tolist(), float(score)) for ids_S, n, score in beams_of_row if n])
    return texts


def _read(sampler: Sampler, params: Any, cache: KVCache, ids_1T: jax.Array) -> KVCache:
    """Add tokens to a cache."""
    _, cache = extend(sampler.model, params, ids_1T, cache)
    return cache


@lru_cache(maxsize=128)  # maximum number of jitted functions: XLA's CPU backend fails with a few hundred programs
def _compiled(function: Callable[..., Any], settings: Sampler | BeamSearch, **jit: Any) -> Any:
    """Return `function` with its first argument, jitted with the options `jit`; equal settings share a program."""
    return jax.jit(partial(function, settings), **jit)


_resize = jax.jit(jnp.resize, static_argnums=1)
_grow = jax.jit(grow, static_argnums=1)
