"""Seconds of a training step beside PyTorch: same shapes, same cores, alternating, medians, and the matmul peak of the run.

python benchmarks/train_step.py                             nanoGPT's CPU shape
python benchmarks/train_step.py --shape medium gpt2         6 layers of 384; GPT-2's 124M
python benchmarks/train_step.py --shape default             the shape of the default preset
python benchmarks/train_step.py --rounds 2 --seconds 1 --peers torch     a look whether it works
python benchmarks/train_step.py --nanogpt DIR               a checkout of nanoGPT's model.py besides
python benchmarks/train_step.py --shape gpt2-gpu --dtype bfloat16     on a GPU: GPT-2's 124M, 16 x 1,024 tokens
python benchmarks/train_step.py --shape gpt2-xl-gpu --dtype bfloat16 --peers torch-compiled --in-turn   1.5B, 8 x 1,024

Every side is a process of its own, which has compiled and warmed up before the first round; only one works at a time. All use
the GPU where there is one (PyTorch with TF32, autocast for bfloat16, and its flash attention), and share its memory;
with --in-turn, a side starts when the one before has ended, for models of which the memory holds one. The shapes for GPUs
read the loss every 10 steps, the others after each step.
A round of a side lasts about --seconds; printed are the median over the rounds and their range. Peers: `torch`
(benchmarks/torch_gpt.py) and `transformers` (GPT2LMHeadModel), each eager and compiled, with PyTorch's fused AdamW and
clipping by the global norm, as our own step has. MFU: 6 x weights in products + 12 L D T FLOPs a token (attention not
halved), over the best float32 product of 1,024 to 2,048 rows in either library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """What is trained: layers, heads, width, context, vocabulary, windows a batch, whether there are biases, how many
    steps a call of ours makes (as the preset has it), and after how many calls each side reads the loss."""

    layers: int
    heads: int
    width: int
    context: int
    vocab: int
    batch: int
    bias: bool
    steps_per_call: int = 1
    calls: int = 1

    @property
    def flops(self) -> int:
        """Of a step, by the formula above."""
        weights = self.layers * 12 * self.width**2 + self.vocab * self.width
        return (6 * weights + 12 * self.layers * self.width * self.context) * self.batch * self.context


SHAPES = {
    "nanogpt-cpu": Shape(4, 4, 128, 64, 65, 12, False, 10),
    "medium": Shape(6, 6, 384, 256, 65, 8, False),
    "default": Shape(4, 4, 128, 128, 97, 32, False),  # as python train.py, but a GPT-2 with AdamW on every side
    "gpt2": Shape(12, 12, 768, 128, 50257, 4, True),
    "gpt2-gpu": Shape(12, 12, 768, 1024, 50304, 16, False, calls=10),
    "gpt2-gpu-64": Shape(12, 12, 768, 1024, 50304, 64, False, calls=10),
    "gpt2-xl-gpu": Shape(48, 25, 1600, 1024, 50304, 8, False, calls=10),
    "toy": Shape(1, 2, 32, 16, 64, 2, False, calls=2),
}
PEERS = ["torch", "torch-compiled", "transformers", "transformers-compiled"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["nanogpt-cpu"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--nanogpt", default="", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round of a side")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of products")
    parser.add_argument("--in-turn", action="store_true", help="run one side after another instead of alternating")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(args.side, SHAPES[args.shape[0]], args.nanogpt, args.dtype)
        return
    sides = ["jaxgpt", *args.peers] + (["nanogpt", "nanogpt-compiled"] if args.nanogpt else [])
    results: dict[str, Any] = {}
    for name in args.shape:
        results[name] = compare(name, sides, args)
    packages = {name: version(name) for name in ("jax", "jaxlib", "torch", "transformers")}
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"python": platform.python_version(), "cores": cores, **packages, "args": vars(args), **results}))


def compare(name: str, sides: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Medians of one shape, printed as they are returned."""
    shape = SHAPES[name]
    flags = ["--shape", name, "--nanogpt", args.nanogpt, "--dtype", args.dtype]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    peaks, memory = [], {}
    for together in [[side] for side in sides] if args.in_turn else [sides]:
        with processes(["peak-jax", "peak-torch", *together], flags) as ask:
            for _ in range(args.rounds):
                peaks.append(max(ask("peak-jax", 0.5), ask("peak-torch", 0.5)))
                for side in together:
                    seconds[side].append(ask(side, args.seconds))
            memory |= {side: ask(side, 0) for side in together}
    peak = statistics.median(peaks)
    tokens = shape.batch * shape.context
    ours = statistics.median(seconds["jaxgpt"])
    print(f"{name}: {tokens:,} tokens a step, {shape.flops / 1e9:.2f} GFLOP, matmul peak {peak / 1e9:.0f} GFLOP/s")
    rows = {}
    for side, times in seconds.items():
        median = statistics.median(times)
        rows[side] = {
            "milliseconds": round(1e3 * median, 2),
            "range": [round(1e3 * min(times), 2), round(1e3 * max(times), 2)],
            "tokens_per_second": round(tokens / median),
            "mfu": round(shape.flops / median / peak, 3),
            "peak_bytes": round(memory[side]),
            "ours_is_faster_by": round(median / ours, 3),
        }
        print(
            f"  {side:22} {1e3 * median:8.2f} ms ({1e3 * min(times):.2f} to {1e3 * max(times):.2f})  "
            f"{tokens / median:8,.0f} tokens/s  {shape.flops / median / peak:4.0%} of peak  "
            f"{memory[side] / 2**30:5.1f} GiB  {median / ours:5.2f} x ours"
        )
    return {"peak_gflops": round(peak / 1e9, 1), "gflop_per_step": shape.flops / 1e9, "sides": rows}


@contextmanager
def processes(sides: list[str], flags: list[str]) -> Iterator[Callable[[str, float], float]]:
    """A process for each side; asked for so many seconds of work, one answers with its figure, and asked for 0 with the
    largest number of bytes it has used: of the GPU where there is one."""
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for side in sides:
            command = [sys.executable, "-W", "ignore", __file__, "--side", side, *flags]
            # Where all share a GPU, nobody takes it for himself.
            env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            running[side] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            _line(running[side], side)  # compiled and warm, before the next one starts

        def ask(side: str, seconds: float) -> float:
            process = running[side]
            assert process.stdin
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
            return float(_line(process, side))

        yield ask
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[str], side: str) -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{side} failed: see above")
    return line


def serve(side: str, shape: Shape, nanogpt: str, dtype: str) -> None:
    """In a process of its own: answer requests for seconds of work until standard input ends."""
    steps = shape.calls
    if side.startswith("peak"):
        steps = 1
        work, flops = peak_jax(dtype) if side == "peak-jax" else peak_torch(dtype)
    else:
        flops = 0
        if side == "jaxgpt":
            steps *= shape.steps_per_call
            work = ours(shape, compute_dtype=dtype, steps_per_call=shape.steps_per_call)
        else:
            work = peer(side, shape, nanogpt, dtype)
    for _ in range(3):
        work()
    print("ready", flush=True)
    for line in sys.stdin:
        if not float(line):
            print(peak_bytes(side), flush=True)
            continue
        start, times = time.perf_counter(), []
        while time.perf_counter() - start < float(line) or len(times) < 3:
            before = time.perf_counter()
            work()
            times.append((time.perf_counter() - before) / steps)
        print(flops / min(times) if flops else statistics.median(times), flush=True)


def peak_bytes(side: str) -> int:
    """The largest memory in use so far: of the GPU where there is one, else of the process."""
    if side == "jaxgpt":
        import jax

        if stats := jax.devices()[0].memory_stats():
            return int(stats["peak_bytes_in_use"])
    else:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_jax(dtype: str) -> tuple[Callable[[], Any], int]:
    """A large product, and its FLOPs."""
    import jaxgpt  # noqa: F401, I001
    import jax
    import jax.numpy as jnp

    n = 2048 if jax.default_backend() == "cpu" else 8192
    a, b = jnp.ones((n // 2, n), dtype), jnp.ones((n, n), dtype)
    product = jax.jit(jnp.dot)
    return lambda: product(a, b).block_until_ready(), n**3


def peak_torch(dtype: str) -> tuple[Callable[[], Any], int]:
    """The same."""
    import torch

    device = torch_device()
    n = 2048 if device == "cpu" else 8192
    a, b = (torch.ones(shape, dtype=getattr(torch, dtype), device=device) for shape in ((n // 2, n), (n, n)))

    def work() -> None:
        a @ b
        if device != "cpu":
            torch.cuda.synchronize()

    return work, n**3


def torch_device() -> str:
    import torch

    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as JAX has it
    return "cuda" if torch.cuda.is_available() else "cpu"


def ours(shape: Shape, **train: Any) -> Callable[[], Any]:
    """A call of ours as `jaxgpt train` makes it: the host's batches in, the losses out; with settings of `train`."""
    from jaxgpt.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
    from jaxgpt.parallel import keep_memory, use_cores

    config = Config(
        model=ModelConfig(
            vocab_size=shape.vocab, block_size=shape.context, n_layer=shape.layers, n_head=shape.heads,
            n_embd=shape.width, bias=shape.bias, activation="gelu",
        ),
        data=DataConfig(dataset="none"),
        optim=OptimConfig(),
        train=TrainConfig(batch_size=shape.batch, **train),
    )  # fmt: skip
    use_cores(config.mesh, model=config.model)
    keep_memory(config)
    import numpy as np

    from jaxgpt.trainer.program import build

    program = build(config)
    state = program.init()
    rng = np.random.default_rng(0)

    n = config.train.steps_per_call

    def work() -> None:
        nonlocal state
        for _ in range(shape.calls):
            batches = rng.integers(0, shape.vocab, (n, shape.batch, shape.context + 1), dtype=np.int32)
            state, metrics = program.steps(state, program.put_steps(list(batches)), n)
        metrics()

    return work


def peer(side: str, shape: Shape, nanogpt: str, dtype: str = "float32") -> Callable[[], Any]:
    """PyTorch's step: forward, backward, clipping, AdamW."""
    import torch

    device = torch_device()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    name = side.removesuffix("-compiled")
    loss_of: Callable[[Any, Any], Any]
    if name == "transformers":
        import transformers

        config = transformers.GPT2Config(
            vocab_size=shape.vocab, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
            n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu",
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config)

        def loss_of(x: Any, y: Any) -> Any:
            logits = forward(input_ids=x, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    elif name == "nanogpt":
        sys.path.insert(0, str(Path(nanogpt)))
        from model import GPT, GPTConfig  # type: ignore[import-not-found]

        model = GPT(
            GPTConfig(
                block_size=shape.context, vocab_size=shape.vocab, n_layer=shape.layers, n_head=shape.heads,
                n_embd=shape.width, dropout=0.0, bias=shape.bias,
            )
        )  # fmt: skip

        def loss_of(x: Any, y: Any) -> Any:
            return forward(x, y)[1]

    else:
        from torch_gpt import TorchGPT

        model = TorchGPT(shape.vocab, shape.context, shape.layers, shape.heads, shape.width, shape.bias)

        def loss_of(x: Any, y: Any) -> Any:
            return forward(x, y)

    model.to(device)
    forward = torch.compile(model) if side.endswith("-compiled") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99), fused=True)
    generator = torch.Generator().manual_seed(0)

    def work() -> None:
        for _ in range(shape.calls):
            batch = torch.randint(0, shape.vocab, (shape.batch, shape.context + 1), generator=generator)
            batch = batch.to(device)
            with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = loss_of(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()

    return work


if __name__ == "__main__":
    main()
