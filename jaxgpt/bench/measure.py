"""Benchmark training and generation on this machine against its measured limits."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxgpt.bench.limits import platform_of, product_peak, read_bandwidth
from jaxgpt.bench.results import BenchResults, DecodeResults, PeakRates, StartSeconds, StepResults
from jaxgpt.bench.trace import device_time, instruction_kinds, record_trace
from jaxgpt.config import Config
from jaxgpt.counts import flops_per_token, multiplied_parameters, parameter_count
from jaxgpt.data import Batches
from jaxgpt.data.tokens import Tokens
from jaxgpt.data_files import has_documents
from jaxgpt.decoding import Sampler, SamplingParams
from jaxgpt.errors import UserError
from jaxgpt.kernels import of_device
from jaxgpt.lm import engine
from jaxgpt.lm.weights import quantize
from jaxgpt.model import GPT
from jaxgpt.model.init import init_params
from jaxgpt.model.params import abstract_params, map_matrices
from jaxgpt.parallel.host import random_bits_by_kernel
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.trainer.build import build
from jaxgpt.trainer.failures import compile_lowered
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.record import LAG

PROMPT = 16  # maximum number of prompt tokens; fewer in a short context
NEW = 128  # maximum number of new tokens; fewer in a short context
TRACED = 1.0  # target duration of a trace in seconds; minimum 2 calls, maximum 10 calls

Step = Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, metrics)


def benchmark(
    config: Config, seconds: float, decode: bool = True, trace: str = "", progress: Progress = NO_PROGRESS
) -> BenchResults:
    """Measure startup, training steps on random ids, input, decoding and the machine's limits.

    `MFU = tokens/s x F / peak`, with F the FLOPs per token (`flops_per_token`). The peak is measured here, in matrix
    products of the compute dtype.

    Args:
        config: settings of the run, with `model.vocab_size` set.
        seconds: approximate duration of the measured training steps; at least 5 calls.
        decode: whether to also measure generation.
        trace: directory to keep the profiler trace in; "": delete the trace.
        progress: receives the name of each stage when the stage starts.

    Raises:
        UserError: if the mesh does not match the devices, the step cannot be compiled, or the context is too short to generate.
    """
    if decode and config.model.block_size < 3:
        raise UserError(
            f"generation needs a model.block_size of at least 3, not {config.model.block_size}: use --no-decode"
        )

    progress.stage("compiling")
    run = _start(config)

    progress.stage(f"training for {seconds:g} s")
    times = _step_times(run.steps, seconds)
    step = statistics.median(times)

    calls = min(max(round(TRACED / (step * run.steps.each)), 2), 10)
    where = _device_time(run, calls, trace, progress)

    progress.stage("measuring peak FLOP/s and bandwidth")
    program = run.program
    limits = _limits(program)

    flops = flops_per_token(config.model, program.abstract_weights, config.window, config.lora)
    device = program.mesh.devices.flat[0]
    results: BenchResults = {
        "device": device.device_kind if device.platform != "cpu" else "cpu",
        "devices": program.mesh.size,
        "jax": jax.__version__,
        "parameters": parameter_count(program.abstract_weights),
        "compute_dtype": config.train.compute_dtype,
        "start_seconds": run.start_seconds,
        "step": _step_results(run, times, flops / limits["flops_per_second"]),
        "where": where,
        "input_seconds": statistics.median(run.steps.input_seconds),
        "limits": limits,
        "flops_per_token": flops,
    }
    if decode:
        progress.stage("generating")
        results["decode"] = _decode(program, limits["bytes_per_second"])
    return results


def _step_results(run: _Started, times: list[float], mfu: float) -> StepResults:
    """Return the results of the measured training steps, from the seconds of a step in each call.

    `mfu` is the MFU at one token per second.
    """
    config = run.program.config
    memory = run.compiled.memory_analysis()
    seconds = statistics.median(times)
    tokens = config.train.batch_size * config.window
    return {
        "seconds": seconds,
        "range": [min(times), max(times)],
        "steps": len(times) * run.steps.each,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "mfu": tokens / seconds * mfu,
        "temporary_bytes": memory.temp_size_in_bytes if memory else 0,
    }


class _Started(NamedTuple):
    """A run after its first step.

    Attributes:
        program: the functions of the run.
        steps: its training steps.
        lowered: the step before compilation.
        compiled: the compiled step.
        start_seconds: time of each stage of the start.
    """

    program: Program
    steps: _Steps
    lowered: Any
    compiled: Any
    start_seconds: StartSeconds


def _start(config: Config) -> _Started:
    """Initialize the weights, compile the training step and take the first step."""
    clock = _Clock()
    program = build(config)
    state, _ = jax.block_until_ready((program.init(), program.frozen))
    steps = _Steps(program, state)
    weights = clock()
    lowered = program.lower(steps.state, steps.batch())
    traced = clock()
    compiled = compile_lowered(program, lowered)
    compilation = clock()
    steps.run(1, each=1)
    seconds = StartSeconds(weights=weights, traced=traced, compiled=compilation, first_step=clock())
    return _Started(program, steps, lowered, compiled, seconds)


def _step_times(steps: _Steps, seconds: float) -> list[float]:
    """Train for about `seconds`, at least 5 calls; return the seconds per step of each call."""
    steps.run(1)  # warm-up: a call of `train.steps_per_call` steps
    clock = _Clock()
    steps.run(3)
    # Average three calls: the time of a call is too short if its steps end while the host prepares a batch.
    expected = clock() / 3
    return steps.run(max(round(seconds / expected), 5))


def _device_time(run: _Started, calls: int, trace: str, progress: Progress) -> dict[str, float]:
    """Trace a number of calls; return the share of device time of each kind of work. `trace` as in `benchmark`."""
    program = run.program
    compiled = run.compiled
    take: Step = program.step
    if platform_of(program.mesh) == "gpu":
        # The kernels of a CUDA graph do not have the names of their instructions in a trace.
        progress.stage("compiling without CUDA graphs")
        compiled = compile_lowered(program, run.lowered, {"xla_gpu_graph_min_graph_size": 10**6})
        take = partial(_take, compiled, program)
        run.steps.run(1, take=take)  # warm-up
    profile = record_trace(lambda: run.steps.run(calls, take=take), trace)
    kinds = instruction_kinds(compiled.as_text() or "")
    return device_time(profile, kinds, len(program.mesh.local_devices))


def _take(compiled: Any, program: Program, state: Any, batch: Any) -> tuple[Any, Any]:
    """Take a step like `program.step`, with a different compilation of this function."""
    result: tuple[Any, Any] = compiled(state, batch, program.numbers, program.frozen)
    return result


def _limits(program: Program) -> PeakRates:
    """Measure the limits of all devices together: FLOP/s in the compute dtype and in bfloat16, bytes/s of memory."""
    dtype = program.config.train.compute_dtype
    peak = product_peak(program.mesh, dtype)
    return {
        "flops_per_second": peak,
        "bfloat16_flops_per_second": peak if dtype == "bfloat16" else product_peak(program.mesh, "bfloat16"),
        "bytes_per_second": read_bandwidth(program.mesh),
    }


class _Clock:
    """A stopwatch: each call returns the seconds since the previous call, or since its creation."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self) -> float:
        last = self._last
        self._last = time.perf_counter()
        return self._last - last


class _Steps:
    """Training steps on random ids, dispatched ahead of the devices as in the training loop."""

    def __init__(self, program: Program, state: Any) -> None:
        config = program.config
        T = config.window
        V = config.model.vocab_size
        ids = np.random.default_rng(0).integers(0, V, max(1 << 20, 4 * T), np.int32)
        self.program = program
        self.state = state
        self.batches = Batches.of(config, Tokens([ids], end_ids=(0,) if has_documents(config) else ()))
        self.step = 0
        self.each = config.train.steps_per_call
        self.input_seconds: list[float] = []  # seconds per step to prepare a batch and put it on the devices

    def batch(self, each: int = 1) -> jax.Array:
        """Return the input of the next call, for `each` steps."""
        return self.program.put_batches([self.batches.at(step) for step in range(self.step, self.step + each)])

    def run(self, calls: int, each: int = 0, take: Step | None = None) -> list[float]:
        """Run `calls` calls of `each` training steps; return the seconds per step of each call.

        With more than `LAG + 1` calls, the first and the last `LAG` are omitted.

        Args:
            calls: number of calls.
            each: steps of a call; 0: `train.steps_per_call`.
            take: function that takes the steps of a call; None: the program's own step.
        """
        each = each or self.each
        take = take or self.program.step
        pending: deque[Any] = deque()  # metrics of the calls in flight
        times: list[float] = []
        clock = _Clock()
        for call in range(calls):
            host = _Clock()
            batch = self.batch(each)
            self.input_seconds.append(host() / each)

            self.state, metrics = take(self.state, batch)
            self.step += each
            pending.append(metrics)
            if call >= LAG:
                jax.block_until_ready(pending.popleft())
                times.append(clock() / each)
        for metrics in pending:
            jax.block_until_ready(metrics)
            times.append(clock() / each)

        # Omit the first call, which started on idle devices, and the last calls, which may end before the host blocks on them.
        return times[1:-LAG] if len(times) > LAG + 1 else times


def _decode(program: Program, bandwidth: float) -> DecodeResults:
    """Measure greedy decoding of one sequence on one device, with weights stored as in `jaxgpt sample`.

    The limit is memory bandwidth: each token reads every weight matrix once.
    """
    config = program.config.model
    dtype = program.config.train.compute_dtype
    device = program.mesh.devices.flat[0]
    sampler = Sampler(GPT(config, of_device(device, dtype)), SamplingParams(temperature=0))
    weights = _decoding_weights(program)
    prompt = min(PROMPT, config.block_size // 2)
    new = min(NEW, config.block_size - prompt)

    clock = _Clock()
    _time_decoding(sampler, weights, prompt, new)
    first_call = clock()
    times = [_time_decoding(sampler, weights, prompt, new) for _ in range(3)]
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


def _decoding_weights(program: Program) -> Any:
    """Return new weights on one device, with matrices in the compute dtype."""
    config = program.config.model
    dtype = program.config.train.compute_dtype
    device = program.mesh.devices.flat[0]
    init = jax.jit(lambda: init_params(GPT(config)), out_shardings=SingleDeviceSharding(device))
    with random_bits_by_kernel(program.mesh):
        params = init()
    return map_matrices(lambda w: w.astype(dtype), quantize(params, config, "float32"), config)


class _DecodingTimes(NamedTuple):
    """Seconds of a generated text."""

    first: float  # time to the first token
    token: float  # time per further token


def _time_decoding(sampler: Sampler, weights: Any, prompt: int, new: int) -> _DecodingTimes:
    """Generate `new` tokens after `prompt` tokens, and measure the time."""
    keys = jax.random.split(jax.random.key(0), 1)
    clock = _Clock()
    state = engine.start(sampler, weights, [[0] * prompt], keys, [new])
    state = jax.block_until_ready(engine.run(sampler, weights, state, 1))
    first = clock()
    jax.block_until_ready(engine.run(sampler, weights, state, new - 1))
    return _DecodingTimes(first, clock() / (new - 1))
