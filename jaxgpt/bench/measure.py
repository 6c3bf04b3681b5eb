"""Benchmark training and generation on this machine against its measured limits."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxgpt.bench.decoding import measure_decoding
from jaxgpt.bench.kinds import instruction_kinds
from jaxgpt.bench.limits import peak_rates, platform_of
from jaxgpt.bench.results import BenchResults, StartSeconds, StepResults
from jaxgpt.bench.steps import Step, Stopwatch, TrainingSteps
from jaxgpt.bench.trace import device_time, record_trace
from jaxgpt.config import Config
from jaxgpt.counts import flops_per_token, parameter_count
from jaxgpt.errors import UserError
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.trainer.build import build
from jaxgpt.trainer.compilation import compile_lowered
from jaxgpt.trainer.program import Program

TRACED = 1.0  # target duration of a trace in seconds; minimum 2 calls, maximum 10 calls


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
        ValueError: if the profiler records no instruction of the step.
    """
    if decode and config.model.block_size < 3:
        raise UserError(
            f"generation needs a model.block_size of at least 3, not {config.model.block_size}: use --no-decode"
        )

    progress.stage("compiling")
    run = _start(config)

    progress.stage(f"training for {seconds:g} s")
    times = _step_times(run.steps, seconds)

    call_seconds = statistics.median(times) * run.steps.per_call
    calls = min(max(round(TRACED / call_seconds), 2), 10)
    where = _device_time(run, calls, trace, progress)

    progress.stage("measuring peak FLOP/s and bandwidth")
    program = run.program
    limits = peak_rates(program.mesh, config.train.compute_dtype)

    flops = flops_per_token(config.model, program.abstract.weights, config.window, config.lora)
    device = program.mesh.devices.flat[0]
    results: BenchResults = {
        "device": device.device_kind if device.platform != "cpu" else "cpu",
        "devices": program.mesh.size,
        "jax": jax.__version__,
        "parameters": parameter_count(program.abstract.weights),
        "compute_dtype": config.train.compute_dtype,
        "start_seconds": run.start_seconds,
        "step": _step_results(run, times, flops, limits["flops_per_second"]),
        "where": where,
        "input_seconds": statistics.median(run.steps.input_seconds),
        "limits": limits,
        "flops_per_token": flops,
    }
    if decode:
        progress.stage("generating")
        results["decode"] = measure_decoding(program, limits["bytes_per_second"])
    return results


def _step_results(run: _Started, times: list[float], token_flops: int, peak: float) -> StepResults:
    """Return the results of the measured training steps.

    Args:
        run: the run after the measured steps.
        times: seconds of a step in each call.
        token_flops: FLOPs of training on one token.
        peak: measured FLOP/s of all devices together.
    """
    config = run.program.config
    memory = run.compiled.memory_analysis()
    seconds = statistics.median(times)
    tokens = config.train.batch_size * config.window
    return {
        "seconds": seconds,
        "range": [min(times), max(times)],
        "steps": len(times) * run.steps.per_call,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "mfu": tokens / seconds * (token_flops / peak),
        "temporary_bytes": memory.temp_size_in_bytes if memory else 0,
    }


class _Started(NamedTuple):
    """A run after its first step.

    Attributes:
        program: the functions of the run.
        steps: training steps of the run.
        lowered: the step before compilation.
        compiled: the compiled step.
        start_seconds: time of each stage of the start.
    """

    program: Program
    steps: TrainingSteps
    lowered: Any
    compiled: Any
    start_seconds: StartSeconds


def _start(config: Config) -> _Started:
    """Initialize the weights, compile the training step and take the first step."""
    clock = Stopwatch()
    program = build(config)
    state, _ = jax.block_until_ready((program.init(), program.frozen))
    steps = TrainingSteps(program, state)
    weights = clock()
    lowered = program.lower(steps.state, steps.batch(1))
    traced = clock()
    compiled = compile_lowered(program, lowered)
    compilation = clock()
    steps.run(1, steps=1)
    seconds = StartSeconds(weights=weights, traced=traced, compiled=compilation, first_step=clock())
    return _Started(program, steps, lowered, compiled, seconds)


def _step_times(steps: TrainingSteps, seconds: float) -> list[float]:
    """Train for about `seconds`, at least 5 calls; return the seconds per step of each call."""
    steps.run(1)  # warm-up: a call of `train.steps_per_call` steps
    clock = Stopwatch()
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
    """Take a step like `program.step`, with the compiled step `compiled`."""
    result: tuple[Any, Any] = compiled(state, batch, program.hyperparameters, program.frozen)
    return result
