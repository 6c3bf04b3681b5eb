"""Speed of reading batches of windows from token files, in tokens per second, without a model.

python benchmarks/reader.py                  200 M random tokens in 1 and 10 files; random and epoch sampling
python benchmarks/reader.py --tokens 1e7 --seconds 0.2       a quick check
python benchmarks/reader.py --sparse 1e10    speed and memory of reading a sparse file, which takes no disk space

The files are uint16 ids as nanoGPT writes them, memory-mapped and in the page cache. `flow` concatenates documents,
`mask` also returns targets and document ids, `pack` packs documents into windows. One thread reads. `batch` is the
number of windows per batch, each of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.data import Batches, Tokens
from jaxgpt.data.packing import pack_documents
from jaxgpt.data.token_files import open_tokens

WIDTH, VOCAB, END = 1024, 50_257, 50_256
DOCUMENT = 700  # mean length of a document in tokens
CHUNK = 10**7  # tokens per write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=2e8)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per repeat of a row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--sparse", type=float, default=0, help="number of tokens of a sparse file to read; 0: off")
    args = parser.parse_args()
    print(
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, NumPy {np.__version__}"
    )
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        if args.sparse:
            sparse(Path(folder), int(args.sparse), args)
        else:
            table(Path(folder), int(args.tokens), args)


def table(folder: Path, n: int, args: argparse.Namespace) -> None:
    """Print the read speed for each combination of files, order, documents and batch size."""
    rng = np.random.default_rng(0)
    for files in (1, 10):
        for i in range(files):
            with (folder / f"{files}_{i}.bin").open("wb") as file:
                for start in range(0, n // files, CHUNK):
                    ids = rng.integers(0, END, min(CHUNK, n // files - start), np.uint16)
                    ids[rng.random(len(ids)) < 1 / DOCUMENT] = END
                    ids.tofile(file)
    print(f"{n:,} tokens; memory before reading {_resident():.0f} MB, memory-mapped files {_mapped():.0f} MB\n")
    print("files  documents  order   batch   M tokens/s")
    for files in (1, 10):
        parts = [open_tokens(folder / f"{files}_{i}.bin") for i in range(files)]
        for documents in ("flow", "mask", "pack"):
            tokens: Any = Tokens(parts, VOCAB, () if documents == "flow" else (END,))
            packed = documents == "pack"
            tokens = pack_documents(tokens, WIDTH) if packed else tokens
            for order in ("random", "epoch"):
                for size in args.batch:
                    batches = Batches(tokens, WIDTH, size, 1, order, int(packed))  # type: ignore[arg-type]
                    speeds = [speed(batches, args.seconds, i) / 1e6 for i in range(args.repeats)]
                    spread = f"{statistics.median(speeds):6.0f} ({min(speeds):.0f} to {max(speeds):.0f})"
                    print(f"{files:5}  {documents:9}  {order:6} {size:6}   {spread}", flush=True)
    print(f"\npeak memory without memory-mapped files {_resident(peak=True) - _mapped():.0f} MB")


def sparse(folder: Path, n: int, args: argparse.Namespace) -> None:
    """Print the speed and memory of reading a sparse file in epoch order."""
    path = folder / "train.bin"
    with path.open("wb") as file:
        file.truncate(2 * n)
    before = _anonymous()
    started = time.perf_counter()
    batches = Batches(Tokens([open_tokens(path)], VOCAB), WIDTH, args.batch[0], 1)
    batches.at(0)[:]
    print(
        f"{n:,} tokens, {batches.per_epoch:,} windows per epoch; first batch after {time.perf_counter() - started:.3f} s"
    )
    found = speed(batches, args.seconds, 0) / 1e6
    print(f"{found:.0f} M tokens/s; memory besides the mapped file grew by {_anonymous() - before:.1f} MB")


def speed(batches: Batches, seconds: float, repeat: int) -> float:
    """Measure the speed of reading batches, in tokens per second."""
    step = 10_000 * repeat
    batches.at(step)[:]
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        done += 1
        batches.at(step + done)[:]
    return done * batches.batch_size * batches.block_size / (time.perf_counter() - begun)


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def _resident(peak: bool = False) -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 if peak else _status("VmRSS")


def _mapped() -> float:
    return _status("RssFile")


def _anonymous() -> float:
    return _status("RssAnon")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
