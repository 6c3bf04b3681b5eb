"""jaxgpt bench PRESET|RUN [--seconds 5] [--no-decode] [--trace DIR] [--json] [--section.field ...]"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from jaxgpt.cli.output import aligned, print_result, progress
from jaxgpt.cli.parse import NO_SETTINGS, ON, GivenSettings, Json
from jaxgpt.cli.settings import named_config, with_settings, with_vocab


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
        seconds: measure training steps for about this many seconds
        decode: also measure generation
        trace: keep the profiler trace in this directory, for XProf and Perfetto
    """
    config = with_vocab(with_settings(named_config(target), settings))
    from jaxgpt.parallel.host import keep_memory, use_cores

    use_cores(config.mesh, model=config.model)
    keep_memory(config)
    from jaxgpt.bench.measure import benchmark

    with progress("starting") as activity:
        results = {"name": target} | benchmark(config, seconds, decode, trace, activity)
    text = as_text(results)
    if trace:
        text += f"\ntrace   {trace}: open the directory with XProf, or its .trace.json.gz with ui.perfetto.dev"
    return print_result(json, results, text)


def as_text(results: dict[str, Any]) -> str:
    """Format the results as text."""
    from jaxgpt.bench.trace import WORK

    facts: dict[str, str | Sequence[str]] = {}
    size = f"{results['parameters']:,} parameters, {results['flops_per_token'] / 1e6:,.1f} MFLOPs per token"
    facts["model"] = f"{results['name']}, {size}, {results['compute_dtype']}"
    facts["device"] = f"{results['devices']} x {results['device']}, jax {results['jax']}"

    start = results["start_seconds"]
    traced = f"weights {start['weights']:.1f} s, step traced {start['traced']:.1f} s"
    compiled = f"compiled or loaded from the cache {start['compiled']:.1f} s"
    facts["start"] = f"{traced}, {compiled}, first step {start['first_step']:.2f} s"

    step = results["step"]
    seconds = step["seconds"]
    low, high = step["range"]
    spread = f"{1e3 * low:.1f} to {1e3 * high:.1f}, {step['steps']} steps of {step['tokens']:,} tokens"
    facts["step"] = f"{1e3 * seconds:.1f} ms ({spread}), {step['tokens_per_second']:,.0f} tokens/s"

    limits = results["limits"]
    products = f"{limits['flops_per_second'] / 1e9:,.0f} GFLOP/s in matrix products"
    faster = limits["bfloat16_flops_per_second"] / limits["flops_per_second"]
    if faster > 1.5:
        products += f", in bfloat16 {faster:.1f} times as fast (--train.compute-dtype bfloat16)"
    memory = f"memory read at {limits['bytes_per_second'] / 1e9:.1f} GB/s"
    facts["peak"] = f"{products}, {memory}: MFU {step['mfu']:.0%}"

    where = ["share of device time in a profiler trace"]
    for kind, share in results["where"].items():
        about = WORK.get(kind, "waiting for the host or for other instructions")
        where.append(f"{kind:<14}{share:6.1%} {1e3 * share * seconds:9.1f} ms  {about}")
    facts["where"] = where
    host = results["input_seconds"]
    facts["host"] = f"prepares a batch in {1e3 * host:.2f} ms, {host / seconds:.1%} of a step"

    decode = results.get("decode")
    if decode:
        speed = f"{decode['tokens_per_second']:,.0f} tokens/s, {decode['of_limit']:.0%} of the memory limit"
        text = f"greedy, batch 1, {decode['prompt']} + {decode['new']} tokens, {decode['dtype']}"
        first = f"first token after {1e3 * decode['first_token_seconds']:.1f} ms"
        facts["decode"] = f"{speed} ({text}); {first}, {decode['first_call_seconds']:.1f} s with compilation"
    return aligned(facts)
