"""Time of a training step compared with PyTorch, on the same shapes and cores.

python benchmarks/train_step.py                             nanoGPT's CPU shape
python benchmarks/train_step.py --shape medium gpt2         6 layers of width 384; GPT-2 124M
python benchmarks/train_step.py --shape default             the shape of the default preset
python benchmarks/train_step.py --rounds 2 --seconds 1 --peers torch     a quick check
python benchmarks/train_step.py --nanogpt DIR               also nanoGPT's model.py, from a checkout
python benchmarks/train_step.py --shape gpt2-gpu --dtype bfloat16     on a GPU: GPT-2 124M, 16 x 1,024 tokens
python benchmarks/train_step.py --shape gpt2-xl-gpu --dtype bfloat16 --peers torch-compiled --in-turn   1.5B, 8 x 1,024 tokens

Every side (jaxgpt or a peer) is a separate process that compiles and warms up before its first round. Only one side
computes at a time. All sides use the GPU if there is one (PyTorch with TF32, or autocast and flash attention for bfloat16), and
share its memory. With --in-turn, a side starts after the previous side has ended, for models too large for two sides in memory.
A round of a side takes about --seconds seconds; the output is the median and the range over the rounds. The loss is read every
10 steps with GPU shapes, every 2 with toy, and otherwise every step. With nanogpt-cpu, jaxgpt reads it every 10 steps.
Peers: `torch` (benchmarks/torch_gpt.py) and `transformers` (GPT2LMHeadModel), each eager and compiled, with PyTorch's
fused AdamW and clipping by the global norm, as in the jaxgpt step. The row of a failed side contains its error. A line
of JSON with the results so far is printed after the first round of each side and after every later round.

On a GPU, compare with `torch-compiled`: `transformers-compiled` has no flash attention with PyTorch 2.13, because
transformers passes an explicit mask while it is compiled. With bfloat16, the residual stream is float32 in PyTorch's autocast
and bfloat16 in jaxgpt, which therefore reads and writes fewer bytes.

MFU: tokens/s x (6 x weights in matrix products + 12 x layers x width x context) / peak FLOP/s, without halving attention
for the causal mask. The peak is the best measured rate of matrix products in either library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Sizes of a model and its training.

    `batch` is the number of windows, and `steps_per_call` the number of optimizer steps in a jaxgpt call. Each side reads the
    loss after `calls` calls; a call of a peer is one step.
    """

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
        """Compute the FLOPs of a step by the MFU formula of the module docstring."""
        weights = self.layers * 12 * self.width**2 + self.vocab * self.width
        return (6 * weights + 12 * self.layers * self.width * self.context) * self.batch * self.context


SHAPES = {
    "nanogpt-cpu": Shape(4, 4, 128, 64, 65, 12, False, 10),
    "medium": Shape(6, 6, 384, 256, 65, 8, False),
    "default": Shape(4, 4, 128, 128, 97, 32, False),  # as in python train.py, but GPT-2 with AdamW on every side
    "gpt2": Shape(12, 12, 768, 128, 50257, 4, True),
    "gpt2-gpu": Shape(12, 12, 768, 1024, 50304, 16, False, calls=10),
    "gpt2-gpu-64": Shape(12, 12, 768, 1024, 50304, 64, False, calls=10),
    "gpt2-xl-gpu": Shape(48, 25, 1600, 1024, 50304, 8, False, calls=10),
    "toy": Shape(1, 2, 32, 16, 64, 2, False, calls=2),
}
PEERS = ["torch", "torch-compiled", "transformers", "transformers-compiled"]
PEAKS = ["peak-jax", "peak-torch"]
QUEUED = 10  # products per timed sample on a GPU, where dispatching and blocking take as long as one product
HELD = contextlib.ExitStack()  # contexts that are open until the process ends
ERROR = "error "  # prefix of the last answer of a failed side


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["nanogpt-cpu"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--nanogpt", default="", help="path of a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per round of a side")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of matrix products")
    parser.add_argument("--in-turn", action="store_true", help="run the sides sequentially instead of alternating")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(args.side, SHAPES[args.shape[0]], args.nanogpt, args.dtype)
        return
    sides = ["jaxgpt", *args.peers] + (["nanogpt", "nanogpt-compiled"] if args.nanogpt else [])
    results = about() | {"args": vars(args)}
    if args.dtype == "bfloat16":
        results["note"] = "the residual stream is float32 in PyTorch's autocast, bfloat16 in jaxgpt"
    for name in args.shape:
        for found in compare(name, sides, args):
            results |= {"devices": found.pop("devices"), name: found}
            print(json.dumps(results), flush=True)
        show(name, results[name])
    print(json.dumps(results), flush=True)
    if failed := [name for name in args.shape if "error" in results[name]["sides"]["jaxgpt"]]:
        raise SystemExit(f"jaxgpt failed with {', '.join(failed)}: see above")


def compare(name: str, sides: list[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the medians of one shape so far, after each side's first round and after each later round.

    A side starts, compiles and warms up before its first round. A failed side is skipped in later rounds.
    """
    shape = SHAPES[name]
    flags = ["--shape", name, "--nanogpt", args.nanogpt, "--dtype", args.dtype]
    answers: dict[str, list[float]] = {side: [] for side in [*PEAKS, *sides]}
    memory: dict[str, float] = {}
    devices: dict[str, str] = {}
    errors: dict[str, str] = {}
    for together in [[side] for side in sides] if args.in_turn else [sides]:
        running: dict[str, Side] = {}
        try:
            for turn in range(args.rounds):
                for side in [*PEAKS, *together]:
                    try:
                        if side not in errors:
                            process = running[side] = running.get(side) or Side(side, flags)
                            devices[side] = process.device
                            answers[side].append(process.ask(0.5 if side in PEAKS else args.seconds))
                            if side in sides:
                                memory[side] = process.ask(0)
                    except SideError as e:
                        errors[side] = str(e)
                    if side in sides and (turn == 0 or side == together[-1]):
                        yield medians(shape, answers, memory, errors) | {"devices": devices}
        finally:
            for process in running.values():
                process.end()


def medians(
    shape: Shape, answers: dict[str, list[float]], memory: dict[str, float], errors: dict[str, str]
) -> dict[str, Any]:
    """Compute the medians and MFU; return a row for each side with an answer or an error."""
    peak = max((statistics.median(answers[side]) for side in PEAKS if answers[side]), default=0.0)
    rows: dict[str, dict[str, Any]] = {}
    for side, times in answers.items():
        if side in errors:
            rows[side] = {"error": errors[side]}
        elif times and side not in PEAKS:
            median = statistics.median(times)
            rows[side] = {
                "milliseconds": round(1e3 * median, 2),
                "range": [round(1e3 * min(times), 2), round(1e3 * max(times), 2)],
                "tokens_per_second": round(shape.batch * shape.context / median),
                "mfu": round(shape.flops / median / peak, 3) if peak else None,
                "peak_bytes": round(memory[side]),
                "ours_is_faster_by": round(median / statistics.median(ours), 3)
                if (ours := answers["jaxgpt"])
                else None,
            }
    return {"peak_gflops": round(peak / 1e9, 1), "gflop_per_step": shape.flops / 1e9, "sides": rows}


def show(name: str, found: dict[str, Any]) -> None:
    """Print the rows of one shape."""
    tokens = SHAPES[name].batch * SHAPES[name].context
    gflop, peak = found["gflop_per_step"], found["peak_gflops"]
    print(f"{name}: {tokens:,} tokens per step, {gflop:.2f} GFLOP, matmul peak {peak:.0f} GFLOP/s")
    for side, row in found["sides"].items():
        if "error" in row:
            print(f"  {side:22} {row['error']}")
            continue
        low, high = row["range"]
        print(
            f"  {side:22} {row['milliseconds']:8.2f} ms ({low:.2f} to {high:.2f})  "
            f"{row['tokens_per_second']:8,} tokens/s  {row['mfu'] or 0:4.0%} of peak  "
            f"{row['peak_bytes'] / 2**30:5.1f} GiB  {row['ours_is_faster_by'] or 0:5.2f} x jaxgpt's time"
        )


class SideError(Exception):
    """Raised if a side does not start, or ends early."""


class Side:
    """A process that measures one side, after compilation and warm-up."""

    def __init__(self, side: str, flags: list[str]) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--side", side, *flags]
        # Do not preallocate GPU memory, because all sides share it.
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.device = self._line()

    def ask(self, seconds: float) -> float:
        """Return the seconds per step, or the peak FLOP/s, measured for `seconds`.

        If `seconds` is 0, return the peak memory so far, in bytes.
        """
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # ended process, reported by `_line`
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
        return float(self._line())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        if not line:
            raise SideError(f"ended with exit code {self._process.wait()}")
        if line.startswith(ERROR):
            self.end()
            raise SideError(line.removeprefix(ERROR))
        return line


def serve(side: str, shape: Shape, nanogpt: str, dtype: str) -> None:
    """Answer the requests of `Side.ask` in a separate process, until standard input ends."""
    # Only answers go to standard output: the output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for answer in work_of(side, shape, nanogpt, dtype):
            print(answer, file=answers, flush=True)
    except Exception as e:
        traceback.print_exc()
        print(ERROR + " ".join(f"{type(e).__name__}: {e}".split())[:300], file=answers, flush=True)
        raise SystemExit(1) from e


def work_of(side: str, shape: Shape, nanogpt: str, dtype: str) -> Iterator[str | float]:
    """Yield the device, then an answer to each line of standard input."""
    steps, flops = shape.calls, 0
    if side in PEAKS:
        steps = 1
        work, flops = peak_jax(dtype) if side == "peak-jax" else peak_torch(dtype)
    elif side == "jaxgpt":
        steps *= shape.steps_per_call
        work = ours(shape, compute_dtype=dtype, steps_per_call=shape.steps_per_call)
    else:
        work = peer(side, shape, nanogpt, dtype)
    for _ in range(3):
        work()
    yield device_name("jax" if side in ("jaxgpt", "peak-jax") else "torch")
    for line in sys.stdin:
        if not float(line):
            yield peak_bytes(side)
            continue
        start, times = time.perf_counter(), []
        while time.perf_counter() - start < float(line) or len(times) < 3:
            before = time.perf_counter()
            work()
            times.append((time.perf_counter() - before) / steps)
        yield flops / min(times) if flops else statistics.median(times)


def about() -> dict[str, Any]:
    """Return the number of cores, and the versions of Python, jax, jaxlib, torch and transformers."""
    found: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    for name in ("jax", "jaxlib", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def device_name(library: str) -> str:
    """Return the device used by "jax" or "torch"; "cpu" for a CPU."""
    if library == "jax":
        import jax

        device = jax.devices()[0]
        return "cpu" if device.platform == "cpu" else device.device_kind
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def peak_bytes(side: str) -> int:
    """Return the peak memory so far in bytes, of the GPU if there is one, otherwise of the process."""
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
    """Return a function that computes large matrix products in JAX, and its FLOPs.

    The matrices are random, because GPUs multiply ones at a higher clock rate.
    """
    import jaxgpt  # noqa: F401, I001
    import jax
    import jax.numpy as jnp

    n, calls = (2048, 1) if jax.default_backend() == "cpu" else (8192, QUEUED)
    a, b = (jax.random.normal(jax.random.key(0), shape, dtype) for shape in ((n // 2, n), (n, n)))
    product = jax.jit(jnp.dot)

    def work() -> None:
        for _ in range(calls):
            out = product(a, b)
        out.block_until_ready()

    return work, calls * n**3


def peak_torch(dtype: str) -> tuple[Callable[[], Any], int]:
    """Return a function that computes large matrix products in PyTorch, and its FLOPs."""
    import torch

    device = torch_device()
    n, calls = (2048, 1) if device == "cpu" else (8192, QUEUED)
    a, b = (torch.randn(shape, dtype=getattr(torch, dtype), device=device) for shape in ((n // 2, n), (n, n)))

    def work() -> None:
        for _ in range(calls):
            a @ b
        if device != "cpu":
            torch.cuda.synchronize()

    return work, calls * n**3


def torch_device() -> str:
    import torch

    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as in JAX
    return "cuda" if torch.cuda.is_available() else "cpu"


def ours(shape: Shape, **train: Any) -> Callable[[], Any]:
    """Return a function that creates batches and runs `shape.calls` calls of the jitted train step.

    `train` contains fields of `TrainConfig`.
    """
    from jaxgpt.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
    from jaxgpt.parallel.host import use_cores
    from jaxgpt.parallel.temporaries import keep_memory, room_for_temporaries

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
    import jax
    import numpy as np

    from jaxgpt.trainer.build import build

    program = build(config)
    state = program.init()
    compiled = program.lower(program.abstract.state, program.batches.abstract(config.train.steps_per_call)).compile()
    HELD.enter_context(room_for_temporaries(program.mesh, compiled))  # as in a run
    rng = np.random.default_rng(0)

    n = config.train.steps_per_call

    def work() -> None:
        nonlocal state
        for _ in range(shape.calls):
            batches = rng.integers(0, shape.vocab, (n, shape.batch, shape.context + 1), dtype=np.int32)
            state, metrics = program.step(state, program.batches.put_for_call(list(batches)))
        jax.block_until_ready(metrics)

    return work


def peer(side: str, shape: Shape, nanogpt: str, dtype: str = "float32") -> Callable[[], Any]:
    """Return a function that takes `shape.calls` steps in PyTorch: forward, backward, clipping, AdamW."""
    import torch
    from torch_gpt import put

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
            batch = put(batch, device)
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
