"""Compare the speed of jaxgpt's data preparation with tiktoken's on the same cores.

Usage: `python benchmarks/prepare.py TOKENIZER [SRC.jsonl]`

encode:   one process, documents in memory: `tokenizers`, tiktoken, and the encoder of jaxgpt.
pipeline: from a JSON Lines file to shards: jaxgpt with one thread per core, and tiktoken in a pool of one process per
          core. The parent process of the pool parses the lines and fills the shards, as in the scripts of llm.c.

TOKENIZER is GPT-2's tokenizer.json or its directory. Without SRC.jsonl, the documents are the Python
files below the standard library's directory, up to about --megabytes MB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.prepare import prepare
from jaxgpt.data.tokenizers.byte_level import BYTE_VOCAB
from jaxgpt.data.tokenizers.fast import fast_encoder
from jaxgpt.data.tokenizers.files import load_tokenizer

WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"  # GPT-2's split pattern
END, SHARD = 50256, 10**8
encoding: Any = None  # the tiktoken encoding of a pool worker


def load_tiktoken(path: str) -> Any:
    """Build tiktoken's GPT-2 encoding from a tokenizer.json, because tiktoken would download its files."""
    import tiktoken

    vocab = json.loads(load_tokenizer(Path(path)).to_json())["model"]["vocab"]
    ranks = {bytes(BYTE_VOCAB[c] for c in name): i for name, i in vocab.items() if i != END}
    return tiktoken.Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": END})


def start(path: str) -> None:
    """Initialize a pool worker: build its tiktoken encoding."""
    global encoding
    encoding = load_tiktoken(path)


def tokenize(text: str) -> np.ndarray:
    """Encode a document in a pool worker; return the end-of-text id and the ids of the document."""
    return np.array([END, *encoding.encode_ordinary(text)], np.uint16)


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a JSON Lines file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def peer(tokenizer: str, source: Path, out: Path, workers: int) -> int:
    """Tokenize with tiktoken in a pool of processes, and write shards; return the number of tokens."""
    shard, filled, total = np.empty(SHARD, np.uint16), 0, 0
    with multiprocessing.get_context("spawn").Pool(workers, start, (tokenizer,)) as pool:
        for ids in pool.imap(tokenize, texts_of(source), chunksize=16):
            total += len(ids)
            while len(ids):
                taken = ids[: SHARD - filled]
                shard[filled : filled + len(taken)] = taken
                ids, filled = ids[len(taken) :], filled + len(taken)
                if filled == SHARD:
                    shard.tofile(out / f"{total}.bin")
                    filled = 0
    shard[:filled].tofile(out / "last.bin")
    return total


def write_corpus(path: Path, megabytes: int) -> None:
    """Write about `megabytes` MB of Python files from the standard library's directory as JSON Lines."""
    left = megabytes * 10**6
    with path.open("w", encoding="utf-8") as out:
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            try:
                text = file.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            out.write(json.dumps({"text": text.replace("\0", "")}) + "\n")
            left -= len(text)
            if left < 0:
                return


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def rounds(repeats: int, size: int, sides: dict[str, Callable[[], int]]) -> None:
    """Time each side in turn, `repeats` times; print its median speed and the ratio to tiktoken's.

    The speed per CPU second is almost independent of the load of the machine.
    """
    speeds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            begun, used = time.perf_counter(), cpu_seconds()
            tokens = side()
            wall, cpu = time.perf_counter() - begun, cpu_seconds() - used
            speeds[name].append((size / wall, tokens / wall, tokens / cpu))
    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in speeds.items()
    }
    for name, (read, wall, cpu) in medians.items():
        ratios = wall / medians["tiktoken"][1], cpu / medians["tiktoken"][2]
        print(
            f"  {name:<12} {read / 1e6:6.2f} MB/s, {wall / 1e6:6.2f} M tokens/s ({ratios[0]:.2f} x tiktoken), "
            f"{cpu / 1e6:6.2f} M tokens per CPU second ({ratios[1]:.2f} x tiktoken)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = args.source or Path(folder) / "corpus.jsonl"
        if args.source is None:
            write_corpus(source, args.megabytes)
        sample, size = list[str](), 0
        for text in texts_of(source):
            sample.append(text)
            size += len(text)
            if size > 10**7:
                break
        tokenizer, tiktoken = load_tokenizer(Path(args.tokenizer)), load_tiktoken(args.tokenizer)
        fast = fast_encoder(tokenizer) or tokenizer.encode
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

        def run(encode: Callable[[str], Any]) -> int:
            return sum(len(encode(text)) for text in sample)

        print(f"encode, one process, {size / 1e6:.0f} MB:")
        sides = {"tiktoken": tiktoken.encode_ordinary, "tokenizers": tokenizer.encode, "jaxgpt": fast}
        rounds(args.repeats, size, {name: partial(run, encode) for name, encode in sides.items()})
        turn = 0

        def jaxgpt() -> int:
            nonlocal turn
            turn += 1
            params = PrepareParams(args.tokenizer, shard_tokens=SHARD, val_fraction=0.0, workers=args.workers)
            index = prepare([str(source)], Path(folder) / str(turn), params)
            return index["splits"]["train"]["tokens"]

        print(f"pipeline, {args.workers} workers, {source.stat().st_size / 1e6:.0f} MB of JSON Lines:")
        rounds(
            args.repeats,
            source.stat().st_size,
            {"tiktoken": lambda: peer(args.tokenizer, source, Path(folder), args.workers), "jaxgpt": jaxgpt},
        )


if __name__ == "__main__":
    sys.exit(main())
