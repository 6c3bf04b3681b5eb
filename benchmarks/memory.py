"""Resident memory of a training process over its steps, by number of steps per call.

    python benchmarks/memory.py [--steps 1000] [--calls 10 1] [--n-layer 6 --n-embd 384 --batch-size 8 --block-size 256]

Prints minimum and maximum of the resident memory in each tenth of the run, and its peak, in MiB. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from jaxgpt.trainer.metrics import read_metrics


def measure(settings: list[str], steps: int, each: int, out: Path) -> list[tuple[int, int]]:
    """Train in a separate process; return (steps done, resident MiB) pairs, sampled every second."""
    fixed = f"--train.steps {steps} --train.steps-per-call {each} --train.log-every 1"
    options = [*settings, *fixed.split(), "--train.eval-windows", "8", "--train.sample-tokens", "0", "--out", str(out)]
    command = [sys.executable, "-m", "jaxgpt", "train", "nanogpt-cpu", "--data.dataset", "python", *options]
    sizes = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            metrics = read_metrics(out / "metrics.jsonl") if (out / "metrics.jsonl").exists() else ()
            done = max((line["step"] + 1 for line in metrics if "loss" in line), default=0)
            if status := Path(f"/proc/{process.pid}/status").read_text().partition("VmRSS:")[2]:
                sizes.append((done, int(status.split()[0]) // 1024))
            time.sleep(1.0)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--eval-every", type=int, default=1000, help="steps between evaluations")
    parser.add_argument("--calls", type=int, nargs="+", default=[10, 1], help="steps per call")
    for name, size in (("n-layer", 6), ("n-embd", 384), ("batch-size", 8), ("block-size", 256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    settings = [
        *("--model.n-layer", str(options.n_layer), "--model.n-embd", str(options.n_embd), "--model.n-head", "6"),
        *("--train.batch-size", str(options.batch_size), "--model.block-size", str(options.block_size)),
        *("--train.eval-every", str(options.eval_every), "--train.eval-batch-size", "0"),
    ]
    for each in options.calls:
        with tempfile.TemporaryDirectory() as place:
            sizes = measure(settings, options.steps, each, Path(place, "run"))
        marks = [options.steps * tenth // 10 for tenth in range(11)]
        for low, high in pairwise(marks):
            if within := [size for done, size in sizes if low < done <= high]:
                print(
                    f"{each:>3} steps per call  steps {low + 1:>5} to {high:>5}  {min(within):>6} to {max(within):>6} MiB",
                    flush=True,
                )
        print(f"{each:>3} steps per call  peak {max(size for _, size in sizes)} MiB", flush=True)


if __name__ == "__main__":
    main()
