"""jaxgpt bench PRESET|RUN [--seconds 5] [--no-decode] [--json] [--section.field ...]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxgpt.cli.info import with_vocab
from jaxgpt.cli.parse import Settings, named_config, note, parse_settings, print_json, split_target
from jaxgpt.config import Config, UserError
from jaxgpt.presets import DEFAULT

PROG = "jaxgpt bench PRESET|RUN"
HELP = """How fast a run trains and generates here, what this machine could do at most, and where the time goes.

Steps are those of training, on random ids. Shares are of a trace of the profiler: the time of all devices, by what the
compiled instructions are for. MFU = tokens/s x (6 P + 12 L N H T) / peak, the peak measured here, in the run's type.
What memory allows: all weights that are multiplied with are read once for every token, at the bandwidth measured here."""


@dataclass(frozen=True)
class Args(Settings):
    seconds: float = 5.0  # of training steps
    decode: bool = True  # generate, too
    json: bool = False  # one JSON object instead of text


def run(args: Sequence[str]) -> int:
    target, flags = split_target(args, PROG)
    parsed, config = parse_settings(Args, flags, PROG, HELP, named_config(target or DEFAULT))
    if not 0 < parsed.seconds <= 3600:
        raise UserError(f"--seconds must be above 0 and at most 3600, not {parsed.seconds:g}")
    config = with_vocab(config)
    from jaxgpt.parallel import keep_memory, use_cores

    use_cores(config.mesh, model=config.model)
    keep_memory(config)
    from jaxgpt.study.bench import bench

    figures = {"name": target} | bench(config, parsed.seconds, parsed.decode, note)
    if parsed.json:
        print_json(figures)
    else:
        print(report(config, figures))
    return 0


def report(config: Config, figures: dict[str, Any]) -> str:
    """The figures in lines for a person."""
    from jaxgpt.study.trace import KINDS

    step, start, limits = (figures[name] for name in ("step", "start_seconds", "limits"))
    train, T = config.train, config.model.block_size
    low, high = (1e3 * seconds for seconds in step["range"])
    source = "from the cache" if start["from_cache"] else "anew"
    lines = [
        f"{figures['name']} on {figures['devices']} x {figures['device']}, jax {figures['jax']}",
        f"model   {figures['parameters']:,} parameters, {figures['flops_per_token'] / 1e6:,.1f} MFLOP a token "
        f"(6 P + 12 L N H T), {figures['compute_dtype']}",
        f"start   weights {start['weights']:.1f} s, step traced {start['traced']:.1f} s, compiled {source} "
        f"{start['compiled']:.1f} s, the first one {start['first_step']:.2f} s",
        f"step    {1e3 * step['seconds']:.1f} ms ({low:.1f} to {high:.1f}, {step['steps']} steps of {train.batch_size} x {T}), "
        f"{step['tokens_per_second']:,.0f} tokens/s",
        f"peak    {limits['flops_per_second'] / 1e9:,.0f} GFLOP/s in products, memory read at "
        f"{limits['bytes_per_second'] / 1e9:.1f} GB/s: MFU {step['mfu']:.0%}",
        "where   share of the devices' time, in a trace",
    ]
    for kind, share in figures["where"].items():
        about = KINDS.get(kind, "waiting for the host, or for each other's instructions")
        lines.append(f"  {kind:<14}{share:6.1%} {1e3 * share * step['seconds']:9.1f} ms  {about}")
    fed = figures["input_seconds"]
    lines.append(f"host    makes a batch in {1e3 * fed:.2f} ms, {fed / step['seconds']:.1%} of a step")
    if decode := figures.get("decode"):
        lines.append(
            f"decode  {decode['tokens_per_second']:,.0f} tokens/s, {decode['of_limit']:.0%} of what memory allows "
            f"(greedy, batch 1, {decode['prompt']} + {decode['new']} tokens, float32); the first one after "
            f"{1e3 * decode['first_token_seconds']:.1f} ms, {decode['first_call_seconds']:.1f} s where it is compiled"
        )
    return "\n".join(lines)
