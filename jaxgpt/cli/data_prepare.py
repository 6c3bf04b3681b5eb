"""jaxgpt data prepare SRC... --out DIR"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxgpt.cli.output import command_line, note, path_word, plural, print_json
from jaxgpt.cli.parse import Json
from jaxgpt.cli.progress import Activity, progress
from jaxgpt.errors import UserError

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def data_prepare(
    *sources: str,
    out: str,
    tokenizer: str = "gpt2",
    vocab_size: int = 32768,
    workers: int = 0,
    shard_tokens: str = "100M",
    val_fraction: float = 0.005,
    format: Literal["llm.c", "nanogpt"] = "llm.c",
    field: str = "text",
    subset: str = "",
    split: str = "train",
    on_error: Literal["fail", "skip"] = "fail",
    json: Json = False,
) -> int:
    """Tokenize documents to shards of token ids that jaxgpt, nanoGPT and llm.c read, with an index.

    Memory is bounded. A killed command continues when it is run again, and ends with the same bytes. Train on the result
    with jaxgpt train --data.path DIR.

    jaxgpt data prepare books/ --out tokens --tokenizer gpt2
    jaxgpt data prepare a.jsonl.gz b.parquet --out tokens --tokenizer bpe --vocab-size 32768
    jaxgpt data prepare hf:HuggingFaceFW/fineweb --subset sample-10BT --out tokens

    Args:
        sources: text file (one document), directory of files, .jsonl, .json or .parquet file (one document per line, object
            or row), or hf:NAME, a Hugging Face dataset; text and JSON may be compressed (.gz, .xz, .bz2)
        out: directory to write to
        tokenizer: gpt2, bpe (trained on a sample of the sources), or the path of a tokenizer or run
        vocab_size: vocabulary size of bpe
        workers: processes; 0: one for each core
        shard_tokens: tokens in each shard
        val_fraction: fraction of the documents for validation, chosen by a hash of their text
        format: llm.c: shards with a header and the end-of-text token before each document; nanogpt: train.bin and val.bin
            without a header
        field: field or column with the text
        subset: subset of a Hugging Face dataset
        split: split of a Hugging Face dataset
        on_error: on a document that cannot be read: fail, or count it and continue
    """
    if not sources:
        raise UserError("missing argument: the documents to tokenize (see jaxgpt data prepare --help)")

    from jaxgpt.data.prepare import Settings, prepare

    settings = Settings(
        tokenizer,
        vocab_size,
        format,
        _parse_count("--shard-tokens", shard_tokens),
        val_fraction,
        field,
        subset,
        split,
    )
    with progress("reading the sources" if tokenizer != "bpe" else "training the tokenizer") as activity:
        report = _Report(activity)
        index = prepare(sources, Path(out), settings, workers, on_error, report, note)
    if json:
        print_json({"out": out} | index)
        return 0
    for label, text in _facts(index):
        print(f"{label:<12} {text}")
    print(f"{'train on it':<12} {command_line('train', '--data.path', path_word(Path(out)))}")
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
        self._activity.name = f"{plural(documents, 'document')}, {plural(tokens, 'token')}{speed}"
        self._activity(read - first_read, max(total - first_read, 0))


def _facts(index: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for split, facts in index["splits"].items():
        shards, size = facts["shards"], facts["bytes"] / max(facts["tokens"], 1)
        counts = f"{plural(facts['documents'], 'document')}, {plural(facts['tokens'], 'token')}"
        yield split, f"{counts} in {plural(len(shards), 'shard')}" + f"; {size:.2f} bytes per token" * bool(shards)
    tokenizer = index["tokenizer"]
    yield "tokenizer", f"{tokenizer['name']}, {tokenizer['vocab_size']:,} tokens"
    if not index["splits"]["val"]["tokens"]:
        yield "validation", "no documents were chosen: jaxgpt train splits the tokens at data.train_fraction"
    skipped = index["skipped"]
    if skipped["documents"]:
        yield "skipped", f"{plural(skipped['documents'], 'document')}; the first:"
        for text in skipped["first"]:
            yield "", text


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
