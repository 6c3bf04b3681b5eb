"""jaxgpt bench PRESET|RUN [--seconds 5] [--no-decode] [--trace DIR] [--json] [--section.field ...]"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from jaxgpt.cli.console import progress
from jaxgpt.cli.options import NO_SETTINGS, ON, GivenSettings, Json
from jaxgpt.cli.output import aligned, print_result
from jaxgpt.cli.settings import named_config, with_settings, with_vocab
from jaxgpt.errors import UserError

if TYPE_CHECKING:
    from jaxgpt.bench.results import BenchResults, DecodeResults, PeakRates, StartSeconds, StepResults

MENTIONED = 1.5  # minimum speedup of bfloat16 to mention in the text


def bench(
    target: str,
    /,
    *,
    seconds: Annotated[float, Parameter(validator=Number(gt=0, lte=3600))] = 5.0,
    decode: Annotated[bool, ON] = True,
    trace: str = "",
    json: Json = False,
    settings: GivenSettings = NO_SETTINGS,
) -> int:
    """Measure training and generation speed, the peak rates of this machine, and time by kind of work.

    Training steps use random token ids. Time by kind of work is the device time of
    compiled instructions in a profiler trace. MFU = tokens/s x (6 P + 12 L N H T)
    / peak; with LoRA, 4 P + 2 A replaces 6 P (symbols: see docs/training.md).
    Here, peak is the measured rate of matrix products in the run's compute dtype.
    The memory limit of decoding assumes that each weight matrix is read once per
    token at the measured bandwidth.

    jaxgpt bench shakespeare
    jaxgpt bench runs/shakespeare --seconds 20
    jaxgpt bench gpt2 --no-decode --trace profile

    Args:
        target: preset or run
        seconds: approximate duration of the measured training steps, in seconds; at least 5 jitted calls
        decode: also measure generation
        trace: keep the profiler trace in this directory, for XProf and Perfetto
    """
    config = with_settings(named_config(target), settings)
    if config.post.objective != "next-token":
        raise UserError(
            f"bench does not support post.objective {config.post.objective}: use the run of --init-from, or omit the objective"
        )
    config = with_vocab(config)
    from jaxgpt.parallel.host import use_cores
    from jaxgpt.parallel.temporaries import keep_memory

    use_cores(config.mesh, model=config.model)
    keep_memory(config)
    from jaxgpt.bench.measure import benchmark

    with progress("starting") as activity:
        results = benchmark(config, seconds, decode, trace, activity)
    text = as_text(target, results)
    if trace:
        text += f"\ntrace   {trace}: open the directory with XProf, or its .trace.json.gz with ui.perfetto.dev"
    return print_result(json, {"name": target, **results}, text)


def as_text(name: str, results: BenchResults) -> str:
    """Format the results of a benchmark of the preset or run `name` as text."""
    step = results["step"]
    facts: dict[str, str | Sequence[str]] = {
        "model": _model(name, results),
        "device": f"{results['devices']} x {results['device']}, jax {results['jax']}",
        "start": _start(results["start_seconds"]),
        "step": _step(step),
        "peak": f"{_peak(results['limits'])}: MFU {step['mfu']:.0%}",
        "where": _where(results["where"], step["seconds"]),
        "host": _host(results["input_seconds"], step["seconds"]),
    }
    if "decode" in results:
        facts["decode"] = _decode(results["decode"])
    return aligned(facts)


def _model(name: str, results: BenchResults) -> str:
    """Describe the model: its size, the FLOPs per token and the compute dtype."""
    size = f"{results['parameters']:,} parameters, {results['flops_per_token'] / 1e6:,.1f} MFLOPs per token"
    return f"{name}, {size}, {results['compute_dtype']}"


def _start(seconds: StartSeconds) -> str:
    """Describe the duration of each stage of the start."""
    traced = f"weights {seconds['weights']:.1f} s, step traced {seconds['traced']:.1f} s"
    compiled = f"compiled or loaded from the cache {seconds['compiled']:.1f} s"
    return f"{traced}, {compiled}, first step {seconds['first_step']:.2f} s"


def _step(step: StepResults) -> str:
    """Describe the time of a training step, and the speed."""
    low, high = step["range"]
    spread = f"{1e3 * low:.1f} to {1e3 * high:.1f}, {step['steps']} steps of {step['tokens']:,} tokens"
    return f"{1e3 * step['seconds']:.1f} ms ({spread}), {step['tokens_per_second']:,.0f} tokens/s"


def _peak(limits: PeakRates) -> str:
    """Describe the peak rates of the machine."""
    products = f"{limits['flops_per_second'] / 1e9:,.0f} GFLOP/s in matrix products"
    bfloat16_speedup = limits["bfloat16_flops_per_second"] / limits["flops_per_second"]
    if bfloat16_speedup > MENTIONED:
        products += f", in bfloat16 {bfloat16_speedup:.1f} times as fast (--train.compute-dtype bfloat16)"
    return f"{products}, memory read at {limits['bytes_per_second'] / 1e9:.1f} GB/s"


def _where(shares: dict[str, float], step_seconds: float) -> list[str]:
    """Return a heading, and a line for each kind of work."""
    from jaxgpt.bench.kinds import WORK

    lines = ["share of device time in a profiler trace"]
    for kind, share in shares.items():
        about = WORK.get(kind, "waiting for the host or for other instructions")
        lines.append(f"{kind:<14}{share:6.1%} {1e3 * share * step_seconds:9.1f} ms  {about}")
    return lines


def _host(batch_seconds: float, step_seconds: float) -> str:
    """Describe the time of the host for a batch, compared with the time of a step."""
    return f"prepares a batch in {1e3 * batch_seconds:.2f} ms, {batch_seconds / step_seconds:.1%} of a step"


def _decode(decode: DecodeResults) -> str:
    """Describe the speed of decoding."""
    speed = f"{decode['tokens_per_second']:,.0f} tokens/s, {decode['of_limit']:.0%} of the memory limit"
    text = f"greedy, batch 1, {decode['prompt']} + {decode['new']} tokens, {decode['dtype']}"
    first = f"first token after {1e3 * decode['first_token_seconds']:.1f} ms"
    return f"{speed} ({text}); {first}, {decode['first_call_seconds']:.1f} s with compilation"
