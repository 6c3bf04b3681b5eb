"""Scaling of a training step: time by depth, width, batch and context; memory at GPT-2's size.

python benchmarks/growth.py                     exponents, four sizes per dimension
python benchmarks/growth.py --seconds 0.2 --sizes 2      a quick check
python benchmarks/growth.py --memory            peak memory of two steps of GPT-2 124M, 4 x 1,024, compared with PyTorch

An exponent is the slope of a line fitted to the logarithms of size and time, or of size and FLOPs (`Shape.flops`). Each
size runs in a separate process with float32 and AdamW; the time is the median of its steps. Memory is the peak resident
memory of the process, including weights, optimizer, compiler and libraries.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

from train_step import SHAPES, Shape, ours, peer

BASE = Shape(4, 4, 128, 128, 96, 8, False)
WAYS = {
    "depth": [BASE._replace(layers=n) for n in (2, 4, 8, 16)],
    "width": [BASE._replace(width=n, heads=n // 32) for n in (64, 128, 256, 512)],
    "batch": [BASE._replace(batch=n) for n in (4, 8, 16, 32)],
    "context": [BASE._replace(context=n) for n in (64, 128, 256, 512)],
}
LONG = SHAPES["gpt2"]._replace(context=1024)
SIDES: dict[str, dict[str, Any]] = {
    "jaxgpt": {},
    "jaxgpt, loss_chunk 128": {"loss_chunk": 128},
    "jaxgpt, remat full": {"remat": "full", "loss_chunk": 128},
    "jaxgpt, scanned, remat dots": {"remat": "dots", "loss_chunk": 128, "scan_layers": True},
    "jaxgpt, scanned, remat full": {"remat": "full", "loss_chunk": 128, "scan_layers": True},
    "torch": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sizes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of measurement per size")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--layers", type=int, default=12, help="number of layers with --memory")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=json.loads, default=BASE, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(
            resident(args.side, Shape(*args.shape)) if args.memory else step_seconds(Shape(*args.shape), args.seconds)
        )
        return
    results = memory(args.layers) if args.memory else {way: exponents(way, args) for way in args.ways}
    packages = {name: version(name) for name in ("jax", "jaxlib")}
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"python": platform.python_version(), "cores": cores, **packages, "args": vars(args), **results}))


def exponents(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure step times along one dimension; return them with the exponents of time and FLOPs."""
    shapes = WAYS[way][: args.sizes]
    sizes = [getattr(shape, "layers" if way == "depth" else way) for shape in shapes]
    times = []
    for shape in shapes:
        times.append(alone("jaxgpt", shape, "--seconds", str(args.seconds)))
    growth, flops = slope(sizes, times), slope(sizes, [shape.flops for shape in shapes])
    told = ", ".join(f"{size}: {1e3 * seconds:.1f} ms" for size, seconds in zip(sizes, times, strict=True))
    print(f"{way:8} {told}; exponent of the time {growth:.2f}, of the FLOPs {flops:.2f}", flush=True)
    return {"sizes": sizes, "seconds": times, "exponent": growth, "exponent_of_flops": flops}


def slope(sizes: list[int], values: list[float] | list[int]) -> float:
    """Fit a line to log(values) over log(sizes) by least squares; return its slope."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in values]
    middle, height = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - middle) * (y - height) for x, y in zip(xs, ys, strict=True)) / sum((x - middle) ** 2 for x in xs)


def memory(layers: int) -> dict[str, Any]:
    """Measure the peak memory of each entry of `SIDES` in GiB."""
    found = {}
    for side in SIDES:
        found[side] = alone(side, LONG._replace(layers=layers), "--memory")
        print(f"{side:26} {found[side]:6.2f} GiB", flush=True)
    return {"gib": found}


def alone(side: str, shape: Shape, *flags: str) -> float:
    """Measure an entry of `SIDES` in a separate process; return seconds per step or, with --memory, GiB."""
    command = [sys.executable, "-W", "ignore", __file__, "--side", side, "--shape", json.dumps(shape), *flags]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def step_seconds(shape: Shape, seconds: float) -> float:
    """Time at least five steps, for `seconds`, after three warm-up steps; return the median in seconds."""
    work = ours(shape)
    for _ in range(3):
        work()
    begin, times = time.perf_counter(), []
    while len(times) < 5 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def resident(side: str, shape: Shape) -> float:
    """Run two steps; return the peak memory of this process in GiB."""
    work = peer("torch", shape, "") if side == "torch" else ours(shape, **SIDES[side])
    work()
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
