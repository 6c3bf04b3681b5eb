"""Run tests and benchmarks on a GPU, in parts of at most 8 minutes; a rerun skips complete parts.

python benchmarks/gpu.py --out results                   run the parts without a result in that directory
python benchmarks/gpu.py --out results train-124m-16     run this part, even if it has a result
python benchmarks/gpu.py --out results --list            print the results so far; run nothing
python benchmarks/gpu.py --out results --toy             run at toy size, to check the script on a CPU

Needs torch, transformers, and the dependencies of jaxgpt with the extras `test` and `cuda13`. `recipe` and `recipe-torch` also
need the text of tinyshakespeare (--text FILE). Nothing is downloaded. Each part runs in a separate process on the first GPU
(of CUDA_VISIBLE_DEVICES, if set). PART.json contains its results or, after a failure, the error, the end of the output and
the results so far. A part without a complete result is run again next time. A repeated part loads compiled programs from
the subdirectory `cache` of --out, which shortens its compilation times. Afterwards, all results are printed as a table and
as one line of JSON.

A part fails if one of its libraries computes on a CPU although there is a GPU; with --toy, all libraries may use the CPU.
Compare training with `torch-compiled`: `transformers-compiled` has no flash attention (see benchmarks/train_step.py).

MFU: tokens/s x (6 x weights in matrix products + 12 x layers x width x context) / peak FLOP/s, without halving attention
for the causal mask. The peak is from the data sheet of a known GPU, otherwise the best measured rate of matrix products.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMIT = 480  # time limit of a part in seconds
PEERS = ["torch-compiled", "transformers-compiled"]
# pytest arguments that exclude tests on several devices. Tests compile without optimization except with --long; cuDNN
# attention is tested with and without --long.
ONE_DEVICE = ["-k", "not mesh and not device and not sharded and not gradient_of_a_bias_in_bfloat16"]
TESTS = {
    "tests-ops": ["tests/ops", "tests/kernels", *ONE_DEVICE],
    "tests-model": ["tests/model", *ONE_DEVICE],
    "tests-decoding": ["tests/decoding", *ONE_DEVICE],
    "tests-cudnn": ["--long", "tests/kernels/test_flash.py", "-k", "cudnn_on_a_gpu"],
}


def parts(toy: bool, text: str) -> dict[str, list[str]]:
    """Return the command of each part: a script in this directory and its arguments."""
    dtype = ["--dtype", "float32" if toy else "bfloat16"]
    rounds = ["--rounds", "1", "--seconds", "0.1"] if toy else ["--rounds", "5", "--seconds", "4"]

    def train(shape: str, *more: str) -> list[str]:
        return ["train_step.py", "--shape", "toy" if toy else shape, *dtype, *rounds, *more]

    def decode(shape: str, batch: int) -> list[str]:
        sizes = ["--shape", "toy", "--repeats", "1", "--new", "4"] if toy else ["--shape", shape, "--compiled"]
        kinds = ["--kinds", "float32", "int8"] if toy else ["--kinds", "float32", "bfloat16", "int8"]
        return ["decode.py", *sizes, *kinds, "--batches", str(batch)]

    def own(name: str) -> list[str]:
        return ["gpu.py", "--run", name, *(["--toy"] if toy else []), *(["--text", text] if text else [])]

    eager = ["torch", "transformers"] if toy else ["torch", *PEERS]
    return {
        "verify": own("verify"),
        **{name: own(name) for name in TESTS},
        "train-124m-16": train("gpt2-gpu", "--peers", *eager),
        "train-124m-64": train("gpt2-gpu-64", "--in-turn", "--peers", *(eager if toy else PEERS)),
        "train-1.5b": train("gpt2-xl-gpu", "--in-turn", "--peers", eager[0] if toy else PEERS[0]),
        "recipe": own("recipe"),
        "recipe-torch": own("recipe-torch"),
        **{f"decode-124m-{batch}": decode("gpt2", batch) for batch in (1, 8, 64)},
        **{f"decode-1.5b-{batch}": decode("gpt2-xl", batch) for batch in (1, 8, 64)},
        "profile": own("profile"),
        "experts": own("experts"),
        "context-32k": own("context-32k"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help="parts to run; default: parts without a result")
    parser.add_argument("--out", type=Path, help="directory of the results")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--text", default="", help="text file of tinyshakespeare, for recipe and recipe-torch")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes after which no part starts")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        from train_step import device_name

        result = RUNS[args.run](args.toy, args.text)
        library = "torch" if args.run == "recipe-torch" else "jax"
        print(json.dumps(result | {"devices": {library: device_name(library)}}))
        return
    commands = parts(args.toy, args.text and str(Path(args.text).resolve()))
    if unknown := set(args.parts) - set(commands):
        parser.error(f"no part {', '.join(sorted(unknown))}: one of {', '.join(commands)}")
    if not args.out:
        parser.error("--out DIRECTORY is missing")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for name in () if args.list else args.parts or commands:
        file = args.out / f"{name}.json"
        if name not in args.parts and file.exists() and "result" in json.loads(file.read_text()):
            continue
        if time.monotonic() - began > 60 * args.minutes:
            break
        print(f"{name}: {' '.join(commands[name])}", flush=True)
        outcome = run(commands[name], args.out, args.toy)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(outcome, indent=1))
        temporary.replace(file)
        print(f"  {outcome.get('error', 'done')}, {outcome['seconds']:.0f} s", flush=True)
    found = {name: args.out / f"{name}.json" for name in commands}
    results = {name: json.loads(file.read_text()) for name, file in found.items() if file.exists()}
    print("\n".join(table(results)))
    print(json.dumps(results))


def run(command: list[str], out: Path, toy: bool) -> dict[str, Any]:
    """Run a part in a new process group; return `command`, `seconds`, `device`, and `result` or `error`."""
    gpu = gpu_name()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(HERE / command[0]), *command[1:]],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        env=environment(out.resolve() / "cache", require_gpu=bool(gpu) and not toy),
    )  # fmt: skip
    error = ""
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        error = f"timed out after {LIMIT} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if error:
        output, _ = process.communicate()
    lines = output.strip().splitlines() or [""]
    result = last_json(lines)
    devices = (result or {}).get("devices", {})
    cpus = [name for name, device in devices.items() if device == "cpu"]
    if not error and process.returncode:
        error = f"exit code {process.returncode}: {lines[-1][:200]}"
    if not error and result is None:
        error = f"no JSON: {lines[-1][:200]}"
    if not error and cpus and (len(cpus) < len(devices) or (gpu and not toy)):
        error = f"computed on a CPU although there is a GPU: {', '.join(cpus)}"
    outcome = {"command": command, "seconds": round(time.monotonic() - began, 1), "device": gpu or cpu_name()}
    if error:
        return outcome | {"error": error, "output": lines[-60:]} | ({"partial": result} if result else {})
    return outcome | {"result": result}


def environment(cache: Path, require_gpu: bool) -> dict[str, str]:
    """Return the environment variables of a part: one GPU, and a compilation cache for repeated parts."""
    ours = {
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Remove a pointer from the cache key of cuDNN attention, because pointers differ between processes.
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "true",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"),
    }
    if require_gpu:
        ours["JAX_PLATFORMS"] = "cuda,cpu"  # no fallback to the CPU if CUDA initialization fails
    env = os.environ | ours
    env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    return env


def last_json(lines: list[str]) -> dict[str, Any] | None:
    """Return the JSON object in the last line that contains one, or None.

    Libraries may print later lines, and the last line of a stopped part may be truncated.
    """
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return None


def gpu_name() -> str:
    """Return name, driver version and memory of the first GPU, from nvidia-smi; "" without a GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if answer.returncode else answer.stdout.strip().split("\n")[0]


def cpu_name() -> str:
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0].split(":", 1)[1].strip() if names else "cpu"


def sheet_peak(device: str) -> float:
    """Return the peak bfloat16 FLOP/s of a GPU from its data sheet; 0: unknown."""
    from jaxgpt.parallel.chips import CHIPS

    name = device.split(",")[0].strip()  # full name, because of the different rates of PCIe, NVL and SXM boards
    return next((chip.flops for chip in CHIPS.values() if name in chip.kinds), 0.0)


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Format the results as a table, with one or more lines for each part that has been run."""
    lines = []
    for name, outcome in results.items():
        if "error" in outcome:
            lines.append(f"{name:16} {outcome['error']}{'; until then:' if 'partial' in outcome else ''}")
        if found := outcome.get("result") or outcome.get("partial"):
            kind = next(kind for kind in TABLES if name.startswith(kind))
            lines += [f"{name:16} {line}" for line in TABLES[kind](found, outcome["device"])]
    return lines


def table_of_training(result: dict[str, Any], device: str) -> list[str]:
    [shape] = result["args"]["shape"]
    peak = sheet_peak(device) or result[shape]["peak_gflops"] * 1e9
    flops = result[shape]["gflop_per_step"] * 1e9
    return [
        f"{side:22} {row['error']}"
        if "error" in row
        else f"{side:22} {row['tokens_per_second']:>11,} tokens/s  {row['milliseconds']:9.2f} ms  "
        f"MFU {flops / row['milliseconds'] * 1e3 / peak if peak else 0:5.1%}  {row['peak_bytes'] / 2**30:5.1f} GiB  "
        f"{row['ours_is_faster_by'] or 0:.2f} x jaxgpt's time"
        for side, row in result[shape]["sides"].items()
    ]


def table_of_decoding(result: dict[str, Any], device: str) -> list[str]:
    del device
    lines = []
    for batch, row in result.items():
        if batch.startswith("batch"):
            ratios = row["over_transformers"]
            lines += [
                f"{side:32} {speed:>10,.1f} tokens/s  {ratios.get(side, 0):.2f} x transformers float32"
                for side, speed in row["tokens_per_second"].items()
            ]
            lines += [f"{side:32} {error}" for side, error in row["errors"].items()]
    return lines


def table_of_rows(result: dict[str, Any], device: str) -> list[str]:
    del device
    return [f"{name:32} {value}" for name, value in result.items()]


TABLES: dict[str, Callable[[dict[str, Any], str], list[str]]] = {
    "train": table_of_training,
    "decode": table_of_decoding,
    "": table_of_rows,
}


def run_verify(toy: bool, text: str) -> dict[str, Any]:
    """Check the laws of `jaxgpt verify` on this device, with a GPT-2 and, except with --toy, a Llama.

    The default precision of float32 matrix products is "highest".
    """
    del text
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    from jaxgpt.config import Config, DataConfig, ModelConfig
    from jaxgpt.verify import fresh, verify

    models = {
        "gpt2": {"bias": True},
        "llama": {"positions": "rope", "norm": "rmsnorm", "mlp": "gated", "activation": "silu", "bias": False},
    }
    outcome: dict[str, Any] = {}
    for name, settings in list(models.items())[: 1 if toy else None]:
        model = ModelConfig(vocab_size=101, block_size=64, n_layer=2, n_head=4, n_embd=64, **settings)  # type: ignore[arg-type]
        for row in verify(fresh(Config(model=model, data=DataConfig(dataset="none")))):
            state = {True: "holds", False: "FAILS", None: "skipped"}[row.ok]
            outcome[f"{name}: {row.name}"] = f"{state}, difference {row.difference}"
        print(json.dumps(outcome), flush=True)
    return outcome


def run_tests(name: str, toy: bool, text: str) -> dict[str, Any]:
    """Run a group of `TESTS` on this device, with "highest" precision in float32 matrix products."""
    del text
    arguments = ["tests/kernels/test_stored.py"] if toy and name != "tests-cudnn" else TESTS[name]
    env = os.environ | {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env |= {} if toy else {"JAX_PLATFORMS": "cuda,cpu"}  # default of tests/conftest.py: "cpu"
    said = ""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        workers = "0" if toy else "8"  # processes that share the GPU: most of the time is compilation
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "-n", workers]
        command += [f"--junitxml={report}", *arguments]
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            for line in process.stdout or ():
                print(line, end="", file=sys.stderr, flush=True)
                said = line.strip() or said
        if not report.exists():
            raise SystemExit(f"pytest wrote no report: {said}")
        suite = next(iter(ET.parse(report).getroot()))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    if not counts["tests"]:
        raise SystemExit("pytest ran no test")
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {bad.get('message', '')[:200]}"
        for case in suite
        for bad in case
        if bad.tag in ("failure", "error")
    ]
    return counts | {f"failed {i}": each for i, each in enumerate(failed[:40])}


def run_profile(toy: bool, text: str) -> dict[str, Any]:
    """Measure tokens/s, MFU and time by kind of operation of the 124M training step (`jaxgpt bench`)."""
    del text
    from jaxgpt.bench import measure
    from jaxgpt.bench.trace import device_time
    from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig

    notes: dict[str, str] = {}

    def device_time_or_note(*args: Any) -> dict[str, float]:
        """Return `device_time(*args)`; {} if the trace is unreadable, so that the throughput is reported."""
        try:
            return device_time(*args)
        except ValueError as e:
            notes["no times by kind"] = str(e)
            return {}

    measure.device_time = device_time_or_note  # type: ignore
    sizes = (64, 16, 1, 2, 32) if toy else (50304, 1024, 12, 12, 768)
    names = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
    model = ModelConfig(**dict(zip(names, sizes, strict=True)), bias=False)  # type: ignore[arg-type]
    train = TrainConfig(batch_size=2 if toy else 16, compute_dtype="float32" if toy else "bfloat16")
    figures = measure.benchmark(
        Config(model=model, train=train, data=DataConfig(dataset="none")), 0.1 if toy else 10, decode=False
    )
    step, start = figures["step"], figures["start_seconds"]
    return {
        "tokens/s": round(step["tokens_per_second"]),
        "MFU of the measured peak": round(step["mfu"], 3),
        **{kind: f"{share:.1%}" for kind, share in figures["where"].items()},
        "compiled or loaded in seconds": round(start["compiled"], 1),
    } | notes


def run_experts(toy: bool, text: str) -> dict[str, Any]:
    """Measure steps of a mixture of experts, and of dense models with as many active and with as many total parameters.

    Each of 8 experts has half the hidden units of GPT-2 124M, and a token uses 2 of them.
    """
    del text
    hidden = 64 if toy else 1536
    models = {
        "dense, as many active": {"n_inner": 2 * hidden},
        "8 experts, 2 active": {"n_inner": hidden, "n_experts": 8, "experts_per_token": 2},
        "dense, as many in total": {"n_inner": 8 * hidden},
    }
    outcome: dict[str, Any] = {}
    for name, settings in models.items():
        outcome[name] = step_of(toy, batch=16, **settings)
        print(json.dumps(outcome), flush=True)
    return outcome


def run_context_32k(toy: bool, text: str) -> dict[str, Any]:
    """Measure steps of GPT-2 124M with windows of 1,024 and of 32,768 tokens, with equal tokens per step."""
    del text
    outcome: dict[str, Any] = {}
    for block_size, batch in ((1024, 32), (32768, 1)):
        outcome[f"{batch} x {block_size:,}"] = step_of(toy, batch, block_size=64 if toy else block_size)
        print(json.dumps(outcome), flush=True)
    return outcome


def step_of(toy: bool, batch: int, **settings: Any) -> str:
    """Measure training steps of the 124M shape with some model settings: speed and memory of temporaries."""
    from jaxgpt.bench.measure import benchmark
    from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig

    shape = {"vocab_size": 50304, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}
    if toy:
        shape = {"vocab_size": 64, "block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 32}
    model = ModelConfig(**{**shape, "bias": False, **settings})
    train = TrainConfig(batch_size=2 if toy else batch, compute_dtype="float32" if toy else "bfloat16")
    found = benchmark(
        Config(model=model, train=train, data=DataConfig(dataset="none")), 0.1 if toy else 5, decode=False
    )
    step = found["step"]
    gib = step["temporary_bytes"] / 2**30
    return f"{step['tokens_per_second']:,.0f} tokens/s, {1e3 * step['seconds']:.2f} ms, temporaries {gib:.2f} GiB"


def run_recipe(toy: bool, text: str) -> dict[str, Any]:
    """Train the preset nanogpt-gpu, and measure the time to a validation loss of 1.47."""
    import numpy as np

    from jaxgpt.presets import preset
    from jaxgpt.trainer.build import build

    ids, vocab = shakespeare(text, toy)
    config = preset("nanogpt-gpu")
    if toy:
        config = config.with_model(n_layer=1, n_embd=32, n_head=2, block_size=16)
    config = config.with_model(vocab_size=vocab)
    program = build(config)
    state = program.init()

    def step(windows: np.ndarray) -> None:
        nonlocal state
        state, _ = program.step(state, program.put(windows))

    def evaluate(windows: np.ndarray) -> float:
        sums = program.sums(state.params, program.put(windows))
        return float(sums.loss_B.sum() / sums.count_B.sum())

    return race(config, ids, step, evaluate, toy) | {"note": program.note}


def run_recipe_torch(toy: bool, text: str) -> dict[str, Any]:
    """Train the model of `run_recipe` on the same batches in PyTorch, compiled (eager at toy size)."""
    import numpy as np
    import torch
    from torch_gpt import TorchGPT, put

    from jaxgpt.presets import preset

    ids, vocab = shakespeare(text, toy)
    config = preset("nanogpt-gpu")
    if toy:
        config = config.with_model(n_layer=1, n_embd=32, n_head=2, block_size=16)
    m, o = config.model, config.optim
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(config.train.seed)
    plain = TorchGPT(vocab, m.block_size, m.n_layer, m.n_head, m.n_embd, m.bias, m.dropout).to(device)
    model = plain if toy else torch.compile(plain)
    decayed = [p for p in plain.parameters() if p.dim() >= 2]
    rest = [p for p in plain.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    betas = (o.beta1, o.beta2)
    optimizer = torch.optim.AdamW(groups, lr=o.learning_rate, betas=betas, fused=device == "cuda")
    done = 0

    def loss_of(windows: np.ndarray) -> Any:
        batch = put(torch.from_numpy(windows.astype(np.int64)), device)
        with torch.autocast(device, torch.bfloat16):
            return model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())

    def step(windows: np.ndarray) -> None:
        nonlocal done
        warm = min(1.0, (done + 1) / (o.warmup_steps + 1))
        share = min(max((done - o.warmup_steps) / max(o.decay_steps - o.warmup_steps, 1), 0.0), 1.0)
        cosine = o.min_lr + 0.5 * (o.learning_rate - o.min_lr) * (1 + float(np.cos(np.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = o.learning_rate * warm if done < o.warmup_steps else cosine
        loss_of(windows).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1

    def evaluate(windows: np.ndarray) -> float:
        plain.eval()
        with torch.no_grad():
            loss = float(loss_of(windows))
        plain.train()
        return loss

    return race(config, ids, step, evaluate, toy)


def shakespeare(text: str, toy: bool) -> tuple[Any, int]:
    """Return the character ids of a text, and the vocabulary size."""
    import numpy as np

    if not text and not toy:
        raise SystemExit("this part needs the text of tinyshakespeare: --text FILE")
    content = Path(text).read_text(encoding="utf-8") if text else "To be, or not to be, that is the question.\n" * 200
    letters = {c: i for i, c in enumerate(sorted(set(content)))}
    return np.fromiter(map(letters.__getitem__, content), np.int32, len(content)), len(letters)


def race(config: Any, ids: Any, step: Callable[[Any], None], evaluate: Callable[[Any], float], toy: bool) -> Any:
    """Train on the batches of the recipe; evaluate every 250 steps on 200 x 64 windows, as nanoGPT does.

    Record the wall-clock time including compilation, and the training time without evaluations and the first 10 steps.
    """
    import numpy as np

    from jaxgpt.data import Batches, Tokens

    T, B = config.model.block_size, config.train.batch_size
    cut = int(0.9 * len(ids))
    batches = Batches(Tokens([ids[:cut]]), T, B, config.train.seed, "random")
    held_out = Batches(Tokens([ids[cut:]]), T, B, 1, "random")
    steps, every, evaluations = (20, 10, 2) if toy else (config.train.steps, config.train.eval_every, 200)
    began = time.perf_counter()
    training, reached, best, at = 0.0, None, np.inf, 0
    found: dict[str, Any] = {}
    for i in range(steps):
        if i == 10:
            evaluate(held_out.at(0)[:])  # blocking on the warm-up steps
            warm = time.perf_counter()
            training = 0.0
        step(batches.at(i)[:])
        if (i + 1) % every == 0 or i + 1 == steps:
            evaluate(held_out.at(0)[:])  # blocking on the previous steps
            if i >= 10:
                training += time.perf_counter() - warm
            loss = float(np.mean([evaluate(held_out.at(n)[:]) for n in range(evaluations)]))
            if loss < best:
                best, at = loss, i + 1
            if reached is None and loss <= 1.47:
                reached = {"step": i + 1, "seconds": time.perf_counter() - began, "training_seconds": training}
            found = {
                "best validation loss": round(best, 4),
                "at step": at,
                "to 1.47": reached,
                "steps": i + 1,
                "steps/s": round((i - 9) / training, 1) if training else None,
                "seconds in all": round(time.perf_counter() - began, 1),
            }
            print(json.dumps(found), flush=True)
            warm = time.perf_counter()
    return found


RUNS: dict[str, Callable[[bool, str], dict[str, Any]]] = {
    "verify": run_verify,
    **{name: functools.partial(run_tests, name) for name in TESTS},
    "recipe": run_recipe,
    "recipe-torch": run_recipe_torch,
    "profile": run_profile,
    "experts": run_experts,
    "context-32k": run_context_32k,
}

if __name__ == "__main__":
    main()
