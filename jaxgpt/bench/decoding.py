"""Measure greedy decoding of one sequence on one device."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxgpt.bench.limits import platform_of
from jaxgpt.bench.results import DecodeResults
from jaxgpt.bench.steps import Stopwatch
from jaxgpt.counts import multiplied_parameters
from jaxgpt.decoding import Sampler, SamplingParams
from jaxgpt.kernels import of_device
from jaxgpt.lm import engine
from jaxgpt.lm.weights import quantize
from jaxgpt.model import GPT
from jaxgpt.model.init import init_params
from jaxgpt.model.params import abstract_params, map_matrices
from jaxgpt.parallel.compile_options import random_bits_by_kernel
from jaxgpt.trainer.program import Program

PROMPT = 16  # maximum number of prompt tokens; fewer in a short context
NEW = 128  # maximum number of new tokens; fewer in a short context


def measure_decoding(program: Program, bandwidth: float) -> DecodeResults:
    """Measure greedy decoding of one sequence on one device, with weights stored as in `jaxgpt sample`.

    The limit is memory bandwidth: each token reads every weight matrix once, except the matrices of unused experts.

    Args:
        program: program of the run, for its model, compute dtype and devices.
        bandwidth: bytes/s that all devices of the program read together.
    """
    config = program.config.model
    dtype = program.config.train.compute_dtype
    device = program.mesh.devices.flat[0]
    sampler = Sampler(GPT(config, of_device(device, dtype)), SamplingParams(temperature=0))
    weights = _decoding_weights(program, device)
    prompt = min(PROMPT, config.block_size // 2)
    new = min(NEW, config.block_size - prompt)

    clock = Stopwatch()
    _time_text(sampler, weights, prompt, new)
    first_call = clock()
    times = [_time_text(sampler, weights, prompt, new) for _ in range(3)]
    token = statistics.median(each.token for each in times)

    weight_bytes = jnp.dtype(dtype).itemsize * multiplied_parameters(config, abstract_params(config))
    if platform_of(program.mesh) != "cpu":  # separate memory per device
        bandwidth /= program.mesh.size
    return {
        "prompt": prompt,
        "new": new,
        "dtype": dtype,
        "first_call_seconds": first_call,
        "first_token_seconds": statistics.median(each.first for each in times),
        "token_seconds": token,
        "tokens_per_second": 1 / token,
        "weight_bytes": weight_bytes,
        "of_limit": weight_bytes / bandwidth / token,
    }


def _decoding_weights(program: Program, device: jax.Device) -> Any:
    """Return random weights on a device, with matrices in the compute dtype."""
    config = program.config.model
    dtype = program.config.train.compute_dtype
    init = jax.jit(lambda: init_params(GPT(config)), out_shardings=SingleDeviceSharding(device))
    with random_bits_by_kernel(program.mesh):
        params = init()
    return map_matrices(lambda w: w.astype(dtype), quantize(params, config, "float32"), config)


class _TextSeconds(NamedTuple):
    """Times to generate a text, in seconds."""

    first: float  # time to the first token
    token: float  # time per further token


def _time_text(sampler: Sampler, weights: Any, prompt: int, new: int) -> _TextSeconds:
    """Generate `new` tokens after `prompt` tokens, and measure the time."""
    keys = jax.random.split(jax.random.key(0), 1)
    clock = Stopwatch()
    state = engine.start(sampler, weights, [[0] * prompt], keys, [new])
    state = jax.block_until_ready(engine.run(sampler, weights, state, 1))
    first = clock()
    jax.block_until_ready(engine.run(sampler, weights, state, new - 1))
    return _TextSeconds(first, token=clock() / (new - 1))
