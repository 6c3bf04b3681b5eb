"""Run the sampler with few compiled programs: prefill prompts, decode, and copy the new tokens to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.decoding.beam import BeamSearch
from jaxgpt.decoding.lookup import lookup_steps
from jaxgpt.decoding.sampler import Sampler, SamplerState, decode_steps, prefill, slide_steps
from jaxgpt.lm.buffers import buffer_sizes, left_pad
from jaxgpt.parallel.arrays import to_host


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
        prompts: ids of each prompt, at least one id.
        keys: one random key per prompt.
        limits: maximum number of new tokens of each prompt, for the text buffer size; rows do not end at their limits.
        ways: number of shards of a batch, as in `buffer_sizes`.
    """
    assert len(keys) == len(prompts), (keys.shape, len(prompts))  # `resize_keys` would silently repeat missing keys
    sizes = buffer_sizes(prompts, limits, ways)
    text = left_pad(prompts, sizes)
    key_B = resize_keys(keys, sizes.rows)
    prefill_rows = jitted(prefill, sampler, static_argnames="size")
    return prefill_rows(params, text, key_B, sizes.text)


def run(sampler: Sampler, params: Any, state: SamplerState, steps: int) -> SamplerState:
    """Generate up to `steps` new tokens per row (prompt lookup: `steps + DRAFT`). The state is donated."""
    if sampler.lookup:
        generate = lookup_steps
    elif sampler.context:
        generate = slide_steps
    else:
        generate = decode_steps
    generate_rows = jitted(generate, sampler, donate_argnames="state")
    return generate_rows(params, state, np.int32(steps))


def new_ids(state: SamplerState, since: int = 0) -> np.ndarray:
    """Return the new tokens at index `since` and later, int32 `[B, n]`.

    A stop id or a negative token (`NO_TOKEN` or `NOT_A_NUMBER`) ends a row; later tokens are undefined.
    """
    return _new(state.text.ids_BS, state, since)


def new_log_p(state: SamplerState, since: int = 0) -> np.ndarray:
    """Return the log probabilities of `new_ids`, float32 `[B, n]`."""
    return _new(state.log_p_BS, state, since)


def _new(x_BS: jax.Array, state: SamplerState, since: int) -> np.ndarray:
    """Return the slots of the new tokens at index `since` and later, copied: the next call donates the state."""
    copied_BS = to_host(x_BS)
    end = int(state.text.length)
    begin = end - int(state.made)
    return copied_BS[:, begin + since : end]


@lru_cache(maxsize=128)  # maximum number of jitted functions: XLA's CPU backend fails with a few hundred programs
def jitted(function: Callable[..., Any], settings: Sampler | BeamSearch, **options: Any) -> Any:
    """Return `function` with its first argument `settings`, jitted with `options`; equal settings share a program."""
    return jax.jit(partial(function, settings), **options)


resize_keys = jax.jit(jnp.resize, static_argnums=1)  # (keys, rows) -> keys, repeated for further rows
