"""Options of `jaxgpt data prepare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxgpt.settings import MAX_VOCAB, Section, setting


@dataclass(frozen=True)
class PrepareParams(Section):
    """Parameters of `jaxgpt data prepare`."""

    tokenizer: str = setting(
        "gpt2", "gpt2, bpe (trained on a sample of the sources), or the path of a tokenizer or run"
    )
    vocab_size: int = setting(32768, "maximum vocabulary size of bpe", 257, MAX_VOCAB)
    format: Literal["llm.c", "nanogpt"] = setting(
        "llm.c",
        "llm.c: shards with a header, end-of-text before documents; nanogpt: one file per split, end-of-text after documents",
    )
    shard_tokens: int = setting(100_000_000, "tokens in each shard of llm.c's format; the last may be smaller", 1)
    val_fraction: float = setting(0.005, "fraction of the documents for validation", 0.0, below=1.0)
    bos: Literal["auto", "yes", "no"] = setting(
        "auto", "beginning-of-text token before each document; auto: if the tokenizer prepends it"
    )
    field: str = setting("text", "field or column with the text")
    separator: str = setting(
        "", "text between the documents of a text file, such as '<|endoftext|>'; empty: one document"
    )
    dedup: Literal["none", "exact"] = setting("none", "exact: keep one of several documents with equal text")
    min_characters: int = setting(0, "drop documents with fewer characters, not counting white space at the ends", 0)
    workers: int = setting(0, "threads; 0: one for each core", 0, 4096)
    on_error: Literal["fail", "skip"] = setting("fail", "on unreadable documents: fail, or skip and count them")
