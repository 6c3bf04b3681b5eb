"""Time to a validation loss on tinyshakespeare, compared with nanoGPT's CPU recipe in PyTorch.

python benchmarks/quality.py --data FILE                    5 seeds, one run of the peer, and the times to the losses in CURVE
python benchmarks/quality.py --data FILE --seeds 1 --curve 0 --peer 0    a quick check

Each time covers a complete process: start, compilation (cold: without the compilation cache), training, and the loss
of the complete validation split. The peer is benchmarks/torch_gpt.py with the 2,000 steps of nanoGPT's README
for a CPU. The peer runs eagerly, which is faster than compiled at this size. Peer and jaxgpt evaluate only once,
at the end; nanoGPT itself also estimates the loss on 20 batches of each split every 250 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

# Target losses in nats per character, and the fastest options found for shakespeare-fast to reach them.
CURVE = {
    1.88: "",
    1.70: "--model.n-layer 3 --model.n-embd 96 --train.steps 420 --train.batch-size 28 "
    "--optim.learning-rate 0.02 --optim.muon-ratio 2.5",
    1.60: "--model.n-layer 3 --model.n-embd 128 --model.block-size 96 --train.steps 450 --train.batch-size 32 "
    "--optim.learning-rate 0.015 --optim.muon-ratio 2.667",
    1.50: "--model.n-layer 4 --model.n-head 6 --model.n-embd 192 --model.block-size 128 --train.steps 580 "
    "--train.batch-size 32 --optim.learning-rate 0.01 --optim.muon-ratio 3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="tinyshakespeare.txt")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--peer", type=int, default=1, help="number of runs of the peer")
    parser.add_argument("--curve", type=int, default=1, help="1: also measure the times to the losses of `CURVE`")
    parser.add_argument("--plot", default="", help="file for a plot of the results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print(peer(args.data))
        return
    results: dict[str, list[tuple[float, float]]] = {}
    for seed in range(args.seeds):
        command = ["shakespeare-fast", "--train.seed", str(seed)]
        ours(command, args.data)  # run that fills the compilation cache
        for kind, cached in (("cold", False), ("warm", True)):
            results.setdefault(f"shakespeare-fast, {kind}", []).append(ours(command, args.data, cached))
    for _ in range(args.peer):
        command = [sys.executable, __file__, "--data", args.data, "--serve"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results.setdefault("nanoGPT's recipe, torch", []).append((time.perf_counter() - start, float(done.stdout)))
    for loss, flags in CURVE.items() if args.curve else ():
        every = ["--train.eval-every", "100000"]  # a single evaluation, at the end
        results[f"to {loss:.2f}"] = [ours(["shakespeare-fast", *flags.split(), *every], args.data, cached=False)]
    if args.plot:
        plot(results, args.plot)
    slow = statistics.median(s for s, _ in results.get("nanoGPT's recipe, torch", [(math.nan, 0.0)]))
    for name, runs in results.items():
        seconds, losses = [s for s, _ in runs], [loss for _, loss in runs]
        median = statistics.median(seconds)
        print(
            f"{name:26} {median:6.1f} s ({min(seconds):.1f} to {max(seconds):.1f}), {median / slow:.2f} x the peer's time; "
            f"loss {statistics.median(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
        )
    packages = {name: version(name) for name in ("jax", "jaxlib", "torch")}
    print(
        json.dumps({"python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), **packages, **results})
    )


def plot(results: dict[str, list[tuple[float, float]]], path: str) -> None:
    """Plot the validation loss over the wall time of complete processes, on a logarithmic time axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    named = [name for name in results if not name.startswith("to ")]
    for name in named:
        axes.scatter(*zip(*results[name], strict=True), label=name, s=24)
    reached = sorted(run for name, runs in results.items() if name not in named for run in runs)
    if reached:
        axes.plot(
            *zip(*reached, strict=True), "o-", label="larger and longer", color="black", markersize=4, linewidth=1
        )
    axes.set_xscale("log")
    ticks = [
        n
        for n in (5, 10, 20, 50, 100, 200, 500, 1000)
        if any(n / 3 < s < 3 * n for r in results.values() for s, _ in r)
    ]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_xlabel("seconds of the complete process, 2 cores")
    axes.set_ylabel("validation loss, nats per character")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def ours(flags: list[str], data: str, cached: bool = True) -> tuple[float, float]:
    """Run `jaxgpt train` in a new process; return its wall time in seconds and the last validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "jaxgpt", "train", *flags, "--data.path", data, "--out", str(out)]
        env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": str(cached).lower()}
        start = time.perf_counter()
        subprocess.run([*command, "--train.sample-tokens", "0"], check=True, capture_output=True, env=env)
        seconds = time.perf_counter() - start
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return seconds, [line["val_loss"] for line in lines if "val_loss" in line][-1]


def peer(path: str) -> float:
    """Run nanoGPT's CPU recipe in PyTorch; return the loss of the complete validation split."""
    import numpy as np
    import torch
    from torch_gpt import TorchGPT

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(1337)
    text = Path(path).read_text()
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.from_numpy(np.array([table[c] for c in text], np.int64))
    train, val = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]
    T, B, steps, warmup, top, low = 64, 12, 2000, 100, 1e-3, 1e-4
    model = TorchGPT(len(table), T, 4, 4, 128, bias=False)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=top, betas=(0.9, 0.99), fused=True)
    for step in range(steps + 1):
        progress = (step - warmup) / (steps - warmup)
        rate = (
            top * (step + 1) / (warmup + 1)
            if step < warmup
            else low + (top - low) * 0.5 * (1 + math.cos(math.pi * progress))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(train) - T, (B,))
        windows = torch.stack([train[i : i + T + 1] for i in starts])
        model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    windows = val[: (len(val) - 1) // T * T + 1].unfold(0, T + 1, T)
    with torch.no_grad():
        losses = [model(w[:, :-1].contiguous(), w[:, 1:].contiguous()).item() * len(w) for w in windows.split(64)]
    return sum(losses) / len(windows)


if __name__ == "__main__":
    main()
