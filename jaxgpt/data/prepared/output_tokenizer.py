"""The tokenizer of `jaxgpt data prepare`: choose it, train it, and write it to the output directory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.index import Index, write_index
from jaxgpt.data.prepared.samples import sample_text
from jaxgpt.data.prepared.shards import TOKENIZER_FILE, token_dtype
from jaxgpt.data.prepared.sources import Source
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import document_bos, with_bos
from jaxgpt.data.tokenizers.bpe import train_bpe_on_sample
from jaxgpt.data.tokenizers.files import save_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data_settings import FROM_TEXT
from jaxgpt.errors import UserError
from jaxgpt.files import sha256_file

BPE_SAMPLE = 200_000_000  # approximate bytes of text for training a BPE tokenizer


class ChosenTokenizer(NamedTuple):
    """The tokenizer of the parameters, or the properties of the BPE that will be trained."""

    tokenizer: Tokenizer | None  # None: a BPE is trained on the sources
    vocab_size: int  # size of the vocabulary; its maximum if a BPE is trained
    sha256: str  # SHA-256 of tokenizer.json, without the changes of the parameter `bos`; "": a BPE is trained
    bos_ids: list[int]  # ids before each document


def choose_tokenizer(params: PrepareParams) -> ChosenTokenizer:
    """Return the tokenizer of the parameters.

    Raises:
        UserError: if the tokenizer cannot be loaded, has no end-of-text token, or lacks the beginning-of-text token that
            `params.bos` yes needs.
    """
    if params.tokenizer == "bpe":
        if params.bos == "yes":
            raise UserError(
                "--bos yes: a trained bpe has no beginning-of-text token; use --bos auto, or a different tokenizer"
            )
        return ChosenTokenizer(None, params.vocab_size, sha256="", bos_ids=[])

    original = _named_tokenizer(params.tokenizer)
    tokenizer = with_bos(original, params.bos)
    return ChosenTokenizer(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        sha256=hashlib.sha256(original.to_json().encode()).hexdigest(),
        bos_ids=list(document_bos(tokenizer)),
    )


def _named_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer with an end-of-text token, by its name; raise `UserError` if it has no such token."""
    needs_data = name in FROM_TEXT or name == "ids"
    tokenizer = None if needs_data else make_tokenizer(name)
    if tokenizer is None or tokenizer.eos_id is None:
        raise UserError(f"the tokenizer {name} has no end-of-text token to separate documents: use gpt2 or bpe")
    return tokenizer


def train_tokenizer(sources: Sequence[Source], params: PrepareParams) -> Tokenizer:
    """Train a BPE on a sample of the sources."""
    return train_bpe_on_sample(partial(sample_text, sources, params), params.vocab_size, BPE_SAMPLE)


def check_id_width(params: PrepareParams, vocab_size: int) -> None:
    """Raise `UserError` if the format cannot hold the ids of a vocabulary."""
    if params.format == "nanogpt" and token_dtype(vocab_size).itemsize > 2:
        raise UserError(f"nanoGPT's 16-bit ids cannot hold a vocabulary of {vocab_size:,}: use --format llm.c")


def set_tokenizer(out: Path, index: Index, tokenizer: Tokenizer, name: str, bos_ids: Sequence[int]) -> None:
    """Write the tokenizer, and record it in `index` and on disk."""
    save_tokenizer(out, tokenizer)
    index["dtype"] = token_dtype(tokenizer.vocab_size).name
    index["tokenizer"] = {
        "name": name,
        "sha256": sha256_file(out / TOKENIZER_FILE),
        "vocab_size": tokenizer.vocab_size,
        "end_id": tokenizer.eos_id,
        "bos": tokenizer.decode(bos_ids),
    }
    write_index(out, index)
