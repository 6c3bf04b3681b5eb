"""Cost of disabling XLA's fused reductions: step times with the reductions off and on.

Some fused reductions are miscompiled (docs/verify.md).

python benchmarks/hazard.py                     the default preset's shape, 3 processes per setting, alternating
python benchmarks/hazard.py --rounds 1 --steps 3    a quick check

Each process builds the preset, runs three warm-up steps on random ids, then times each remaining step. The result of a
process is its median step time; the output is the median and the range over the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

FLAG = "--xla_cpu_experimental_ynn_fusion_type="
WAYS = {"off": f"{FLAG}-reduce", "on": f"{FLAG}+reduce"}  # XLA_FLAGS for fused reductions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--preset", default="python-char")
    parser.add_argument("--rounds", type=int, default=3, help="processes per setting")
    parser.add_argument("--steps", type=int, default=20, help="timed steps per process")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(one(args.preset, args.steps))
        return
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way, flag in WAYS.items():
            command = [
                sys.executable,
                "-W",
                "ignore",
                __file__,
                "--one",
                f"--preset={args.preset}",
                f"--steps={args.steps}",
            ]
            env = os.environ | {"XLA_FLAGS": flag}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            seconds[way].append(float(done.stdout))
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    figures = {
        "preset": args.preset,
        "milliseconds": {way: [round(1000 * t, 1) for t in times] for way, times in seconds.items()},
        "cost": round(medians["off"] / medians["on"] - 1, 3),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("jax", "jaxlib")},
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
    }
    print(json.dumps(figures))
    for way, median in medians.items():
        times = figures["milliseconds"][way]
        print(f"fused reductions {way:3}  {1000 * median:7.1f} ms a step  ({min(times)} to {max(times)})")
    print(f"disabling fused reductions changes the step time by {100 * figures['cost']:+.1f}%")


def one(preset_name: str, steps: int) -> float:
    """Train a preset in this process; return the median step time in seconds."""
    import numpy as np

    from jaxgpt.cli.settings import with_vocab
    from jaxgpt.parallel.host import use_cores
    from jaxgpt.presets import preset

    config = with_vocab(preset(preset_name))
    use_cores(config.mesh)
    import jax

    from jaxgpt.trainer.build import build

    program = build(config)
    shape = (config.train.batch_size, config.model.block_size + 1)
    batch = program.put(np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32))
    state, times = program.init(), []
    for step in range(steps + 3):
        began = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        if step >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
