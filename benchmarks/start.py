"""Time of --help, first train step and first sampled character, with a cold and a warm cache.

python benchmarks/start.py                  the default preset, medians of 3 processes per measurement
python benchmarks/start.py --repeats 1      a quick check

Cold: without the compilation cache (`JAX_ENABLE_COMPILATION_CACHE=false`). Warm: with the cache filled by an
earlier process. The time ends when metrics.jsonl has its first loss, or `jaxgpt sample --stream` prints a new character.
Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="python-char")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        env = os.environ | {"JAXGPT_CACHE": str(root / "cache")}
        command = [sys.executable, "-m", "jaxgpt"]
        run = root / "run"
        subprocess.run(
            [*command, "train", args.preset, "--out", str(run), "--train.steps", "2", "--train.sample-tokens", "0"],
            env=env, check=True, capture_output=True,
        )  # fmt: skip
        first_step([*command, "train", args.preset, "--out", str(root / "fill")], env, root / "fill")
        sample = ["sample", str(run), "--prompt", "def ", "--max-new-tokens", "50", "--stream"]
        subprocess.run([*command, *sample], env=env, check=True, capture_output=True)
        seconds: dict[str, list[float]] = {}
        for repeat in range(args.repeats):
            for kind, cached in (("cold", "false"), ("warm", "true")):
                env["JAX_ENABLE_COMPILATION_CACHE"] = cached
                out = root / f"{kind}{repeat}"
                train = ["train", args.preset, "--out", str(out), "--train.log-every", "1"]
                seconds.setdefault(f"first step, {kind}", []).append(first_step([*command, *train], env, out))
                streamed = first_character([*command, *sample], env)
                seconds.setdefault(f"first character, {kind}", []).append(streamed)
            for words in (["--help"], ["train", "--help"]):
                start = time.perf_counter()
                subprocess.run([*command, *words], env=env, check=True, capture_output=True)
                seconds.setdefault(" ".join(words), []).append(time.perf_counter() - start)
    for name, times in seconds.items():
        print(f"{name:24} {statistics.median(times):6.2f} s  ({min(times):.2f} to {max(times):.2f})")
    about = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), "args": vars(args)}
    print(json.dumps(about | {name: version(name) for name in ("jax", "jaxlib")} | {"seconds": seconds}))


def first_step(command: list[str], env: dict[str, str], out: Path) -> float:
    """Run a command until the first step's metrics are written; return the wall time in seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        metrics = out / "metrics.jsonl"
        while not (metrics.is_file() and '"loss"' in metrics.read_text("utf-8")):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended before its first step")
            time.sleep(0.01)
        return time.perf_counter() - start
    finally:
        process.kill()
        process.wait()


def first_character(command: list[str], env: dict[str, str]) -> float:
    """Run a command until it prints a character after the prompt; return the wall time in seconds."""
    start = time.perf_counter()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        seen = b""
        while len(seen) <= len("def "):
            if not (byte := os.read(process.stdout.fileno(), 1)):
                raise SystemExit(f"no text from: {' '.join(command)}")
            seen += byte
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


if __name__ == "__main__":
    main()
