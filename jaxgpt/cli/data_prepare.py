"""jaxgpt data prepare SRC... --out DIR"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxgpt.cli.console import note, progress
from jaxgpt.cli.options import FLAT, Json
from jaxgpt.cli.output import print_result
from jaxgpt.config import PrepareParams
from jaxgpt.early_end import set_advice
from jaxgpt.errors import UserError, plural

if TYPE_CHECKING:
    from jaxgpt.data.prepared.index import Index, Skips, SplitEntry, TokenizerEntry

WINDOW = 1024  # tokens per window, for counting validation windows
MIN_WINDOWS = 50  # minimum number of validation windows for comparing runs by their loss


def data_prepare(
    *sources: str, out: str, json: Json = False, params: Annotated[PrepareParams, FLAT] = PrepareParams()
) -> int:
    """Tokenize documents into shards of token ids for jaxgpt, and for llm.c or nanoGPT, with an index.

    Memory use is bounded. To continue a killed command, run it again: interruptions
    do not change the output. Train on the result with jaxgpt train --data.path DIR.

    jaxgpt data prepare books/ --out tokens --tokenizer gpt2
    jaxgpt data prepare a.jsonl.gz b.parquet --out tokens --tokenizer bpe --vocab-size 32768

    Args:
        sources: text file (one document), directory of files, .jsonl or .parquet file (one document per line or row), or
            hf:OWNER/NAME[/PATTERN], a Hugging Face dataset; .json: lines, an array of objects, or one object; text and
            JSON may be compressed (.gz, .xz, .bz2, .zst)
        out: directory to write to
    """
    if not sources:
        raise UserError("missing argument: the documents to tokenize (see jaxgpt data prepare --help)")

    from jaxgpt.data.prepared.prepare import prepare

    set_advice(lambda: f"repeat the command to continue {out}")
    stage = "training the tokenizer" if params.tokenizer == "bpe" else "reading the sources"
    with progress(stage) as activity:
        index = prepare(sources, Path(out), params, activity, note)

    values = {"out": out, **index}
    next_command = shlex.join(["jaxgpt", "train", "--data.path", out])
    facts = _facts(index) | {"next": next_command}
    return print_result(json, values, facts)


def _facts(index: Index) -> dict[str, str | list[str]]:
    """Return the lines about an index, keyed by label; lines that do not apply are empty."""
    splits = index["splits"]
    dropped = index["dropped"]
    repeated = dropped["repeated"]
    short = dropped["short"]
    return {
        **{name: _split(part) for name, part in splits.items()},
        "tokenizer": _tokenizer(index["tokenizer"]),
        "validation": _validation(splits["train"]["tokens"], splits["val"]["tokens"]),
        "skipped": _skipped(index["skipped"]),
        "repeated": f"{plural(repeated, 'document')} dropped: copies of earlier documents" if repeated else "",
        "short": f"{plural(short, 'document')} dropped: below --min-characters" if short else "",
        "markers": _markers(index["markers"]),
    }


def _split(part: SplitEntry) -> str:
    """Describe the documents, tokens, shards and bytes of a split."""
    counts = f"{plural(part['documents'], 'document')}, {plural(part['tokens'], 'token')}"
    size = f"; {part['bytes'] / part['tokens']:.2f} bytes per token" if part["tokens"] else ""
    return f"{counts} in {plural(len(part['shards']), 'shard')}{size}"


def _tokenizer(tokenizer: TokenizerEntry) -> str:
    """Describe the name, size and beginning-of-text token of the tokenizer."""
    bos = f"; {tokenizer['bos']} before each document" if tokenizer.get("bos") else ""
    return f"{tokenizer['name']}, {tokenizer['vocab_size']:,} tokens{bos}"


def _validation(train: int, val: int) -> str:
    """Describe the validation split of `val` tokens, and warn if it is too small to compare runs."""
    if not val:
        return "no documents were selected, so jaxgpt train splits the tokens at --data.train-fraction"
    text = f"{val / (val + train):.2%} of the tokens"
    if val // WINDOW < MIN_WINDOWS:
        fix = "raise --val-fraction to compare runs by their loss"
        text += f"; fewer than {MIN_WINDOWS} windows of {WINDOW:,} tokens: {fix}"
    return text


def _markers(number: int) -> str:
    """Describe the end-of-text markers that were read as ordinary text, or return ""."""
    from jaxgpt.data.tokenizers.base import END_OF_TEXT

    if not number:
        return ""
    fix = f"use --separator '{END_OF_TEXT}'"
    return f"{END_OF_TEXT} as ordinary text {plural(number, 'time')}; to separate documents there, {fix}"


def _skipped(skipped: Skips) -> list[str]:
    """Describe unreadable documents and files: their numbers, then the errors (`skipped_lines`)."""
    from jaxgpt.data.prepared.skips import skipped_lines

    numbers = {"file": skipped["files"], "document": skipped["documents"]}
    counts = [plural(number, noun) for noun, number in numbers.items() if number]
    if not counts:
        return []
    return [f"{' and '.join(counts)} unreadable:", *skipped_lines(skipped)]
