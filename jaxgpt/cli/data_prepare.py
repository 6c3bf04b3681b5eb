"""jaxgpt data prepare SRC... --out DIR"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxgpt.cli.parse import Command, command_line, note, path_word, print_json
from jaxgpt.cli.progress import Activity, progress
from jaxgpt.config import UserError

COMMAND = Command(
    "data prepare",
    "SRC...",
    """Tokenize documents to shards of token ids that jaxgpt, nanoGPT and llm.c read, with an index.

SRC is a text file (one document), a directory of files, a .jsonl, .json or .parquet file (one document per line, object or
row), or hf:NAME, a Hugging Face dataset. Text and JSON may be compressed (.gz, .xz, .bz2). Memory is bounded. A killed command
continues when it is run again, and ends with the same bytes. Train on the result with jaxgpt train --data.path DIR.""",
    [
        "jaxgpt data prepare books/ --out tokens --tokenizer gpt2",
        "jaxgpt data prepare a.jsonl.gz b.parquet --out tokens --tokenizer bpe --vocab-size 32768",
        "jaxgpt data prepare hf:HuggingFaceFW/fineweb --subset sample-10BT --out tokens",
    ],
)
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


@dataclass(frozen=True)
class Args:
    out: str = ""  # folder to write to
    tokenizer: str = "gpt2"  # gpt2, bpe (trained on a sample of the sources), or the path of a tokenizer or run
    vocab_size: int = 32768  # vocabulary size of bpe
    workers: int = 0  # processes; 0: one for each core
    shard_tokens: str = "100M"  # tokens in each shard
    val_fraction: float = 0.005  # fraction of the documents for validation, chosen by a hash of their text
    # llm.c: shards with a header and the end-of-text token before each document; nanogpt: train.bin and val.bin without one
    format: Literal["llm.c", "nanogpt"] = "llm.c"
    field: str = "text"  # field or column with the text
    subset: str = ""  # subset of a Hugging Face dataset
    split: str = "train"  # split of a Hugging Face dataset
    on_error: Literal["fail", "skip"] = "fail"  # on a document that cannot be read: fail, or count it and continue
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    sources, parsed = COMMAND.parse(Args, args)
    if not parsed.out:
        raise UserError("missing option: --out DIR, the folder to write to")

    from jaxgpt.data.prepare import Settings, prepare

    settings = Settings(
        parsed.tokenizer,
        parsed.vocab_size,
        parsed.format,
        _parse_count("--shard-tokens", parsed.shard_tokens),
        parsed.val_fraction,
        parsed.field,
        parsed.subset,
        parsed.split,
    )
    with progress("reading the sources" if parsed.tokenizer != "bpe" else "training the tokenizer") as activity:
        report = _Report(activity)
        index = prepare(sources, Path(parsed.out), settings, parsed.workers, parsed.on_error, report, note)
    if parsed.json:
        print_json({"out": parsed.out} | index)
        return 0
    for label, text in _facts(index):
        print(f"{label:<12} {text}")
    print(f"{'train on it':<12} {command_line('train', '--data.path', path_word(Path(parsed.out)))}")
    return 0


class _Report:
    """Shows documents, tokens and the speed of this process."""

    def __init__(self, activity: Activity) -> None:
        self._activity, self._start = activity, (0.0, 0, 0)

    def __call__(self, index: Mapping[str, Any], read: int, total: int) -> None:
        documents, tokens = (sum(entry[key] for entry in index["splits"].values()) for key in ("documents", "tokens"))
        if not self._start[0]:
            self._activity.stage("tokenizing")
            self._start = time.monotonic(), tokens, read
        started, first_tokens, first_read = self._start
        seconds = time.monotonic() - started
        speed = f", {(tokens - first_tokens) / seconds:,.0f} tokens/s" if seconds > 1 else ""
        self._activity.name = f"{_count_of(documents, 'document')}, {_count_of(tokens, 'token')}{speed}"
        self._activity(read - first_read, max(total - first_read, 0))


def _facts(index: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for split, facts in index["splits"].items():
        shards, size = facts["shards"], facts["bytes"] / max(facts["tokens"], 1)
        counts = f"{_count_of(facts['documents'], 'document')}, {_count_of(facts['tokens'], 'token')}"
        yield split, f"{counts} in {_count_of(len(shards), 'shard')}" + f"; {size:.2f} bytes per token" * bool(shards)
    tokenizer = index["tokenizer"]
    yield "tokenizer", f"{tokenizer['name']}, {tokenizer['vocab_size']:,} tokens"
    if not index["splits"]["val"]["tokens"]:
        yield "validation", "no documents were chosen: jaxgpt train splits the tokens at data.train_fraction"
    skipped = index["skipped"]
    if skipped["documents"]:
        yield "skipped", f"{_count_of(skipped['documents'], 'document')}; the first:"
        for text in skipped["first"]:
            yield "", text


def _count_of(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _parse_count(flag: str, text: str) -> int:
    """Parse a number of tokens, such as 100M.

    Raises:
        UserError: if it is not a number.
    """
    word = text.strip().lower().replace("_", "").replace(",", "")
    number, unit = (word[:-1], word[-1]) if word[-1:] in UNITS else (word, "")
    try:
        return round(float(number) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        raise UserError(f"{flag} must be a number of tokens, such as 100M or 100000000: {text!r}") from None
