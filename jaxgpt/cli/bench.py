"""jaxgpt bench PRESET|RUN [--seconds 5] [--no-decode] [--trace DIR] [--json] [--section.field ...]"""

from __future__ import annotations

from typing import Any

from jaxgpt.cli.info import flops_formula
from jaxgpt.cli.output import print_json
from jaxgpt.cli.parse import Json, Settings
from jaxgpt.cli.progress import progress
from jaxgpt.cli.settings import named_config, with_settings, with_vocab
from jaxgpt.config import Config
from jaxgpt.errors import UserError


def bench(
    target: str,
    /,
    *,
    seconds: float = 5.0,
    decode: bool = True,
    trace: str = "",
    json: Json = False,
    settings: Settings,
) -> int:
    """Measure training and generation speed on this machine, its peak rates, and where the time goes.

    Training steps use random token ids. The breakdown is the device time by kind of compiled instruction, from a profiler
    trace. MFU = tokens/s x (6 P + 12 L N H T) / peak, where peak is the rate of matrix products measured here in the run's
    compute dtype; with LoRA, 4 P + 2 A replaces 6 P. The memory limit of decoding assumes that each weight matrix is read
    once per token at the measured bandwidth.

    jaxgpt bench shakespeare
    jaxgpt bench runs/shakespeare --seconds 20
    jaxgpt bench gpt2 --no-decode --trace profile

    Args:
        target: preset or run
        seconds: measure training steps for this many seconds
        decode: also measure generation
        trace: keep the profiler trace in this directory, for XProf and Perfetto
    """
    config = with_vocab(with_settings(named_config(target), settings))
    if not 0 < seconds <= 3600:
        raise UserError(f"--seconds must be above 0 and at most 3600, not {seconds:g}")
    from jaxgpt.parallel import keep_memory, use_cores

    use_cores(config.mesh, model=config.model)
    keep_memory(config)
    from jaxgpt.study import bench as measure

    with progress("starting") as activity:
        results = {"name": target} | measure.bench(config, seconds, decode, trace, activity.stage)
    if json:
        print_json(results)
    else:
        print(report(config, results))
        if trace:
            print(f"trace   {trace}: open the directory with XProf, or its .trace.json.gz with ui.perfetto.dev")
    return 0


def report(config: Config, results: dict[str, Any]) -> str:
    """Format the results as text."""
    from jaxgpt.study.trace import WORK

    step, start, limits = (results[name] for name in ("step", "start_seconds", "limits"))
    train, T = config.train, config.window
    low, high = (1e3 * seconds for seconds in step["range"])
    source = "compiled (cached)" if start["from_cache"] else "compiled"
    lines = [
        f"{results['name']} on {results['devices']} x {results['device']}, jax {results['jax']}",
        f"model   {results['parameters']:,} parameters, {results['flops_per_token'] / 1e6:,.1f} MFLOPs per token "
        f"({flops_formula(config)}), {results['compute_dtype']}",
        f"start   weights {start['weights']:.1f} s, step traced {start['traced']:.1f} s, {source} "
        f"{start['compiled']:.1f} s, first step {start['first_step']:.2f} s",
        f"step    {1e3 * step['seconds']:.1f} ms ({low:.1f} to {high:.1f}, {step['steps']} steps of {train.batch_size} x {T}), "
        f"{step['tokens_per_second']:,.0f} tokens/s",
        f"peak    {limits['flops_per_second'] / 1e9:,.0f} GFLOP/s in matrix products, memory read at "
        f"{limits['bytes_per_second'] / 1e9:.1f} GB/s: MFU {step['mfu']:.0%}",
        "where   share of device time in a profiler trace",
    ]
    for kind, share in results["where"].items():
        about = WORK.get(kind, "waiting for the host or for other instructions")
        lines.append(f"  {kind:<14}{share:6.1%} {1e3 * share * step['seconds']:9.1f} ms  {about}")
    fed = results["input_seconds"]
    lines.append(f"host    prepares a batch in {1e3 * fed:.2f} ms, {fed / step['seconds']:.1%} of a step")
    if decode := results.get("decode"):
        lines.append(
            f"decode  {decode['tokens_per_second']:,.0f} tokens/s, {decode['of_limit']:.0%} of the memory limit "
            f"(greedy, batch 1, {decode['prompt']} + {decode['new']} tokens, float32); first token after "
            f"{1e3 * decode['first_token_seconds']:.1f} ms, {decode['first_call_seconds']:.1f} s with compilation"
        )
    return "\n".join(lines)
