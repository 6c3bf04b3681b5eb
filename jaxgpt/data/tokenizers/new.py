"""Make the tokenizer that `data.tokenizer` specifies: by name, from the training text, or from a file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from jaxgpt.data.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.bpe import train_bpe_on_sample
from jaxgpt.data.tokenizers.cuts import GPT2_CUTS, cut
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.tokenizer_json import read_tokenizer_json
from jaxgpt.errors import UserError
from jaxgpt.hub import download

GPT2_REPO = "openai-community/gpt2"
GPT2_REVISION = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


def make_tokenizer(
    kind: str, text: str | Sequence[str] = "", vocab_size: int = 0, model_vocab_size: int = 0
) -> Tokenizer:
    """Make the tokenizer that `data.tokenizer` specifies; raise `UserError` if it cannot be made.

    Args:
        kind: name (char, word, byte, gpt2, bpe, ids), or the path of a tokenizer.json or its directory.
        text: one or several texts to build char, word or bpe from.
        vocab_size: maximum vocabulary size, for kind bpe.
        model_vocab_size: vocabulary size, for kind ids, where token i is the decimal number i.
    """
    texts = [text] if isinstance(text, str) else text
    match kind:
        case "char":
            return CharTokenizer(set[str]().union(*texts))
        case "word":
            return WordTokenizer(itertools.chain.from_iterable(map(str.split, texts)))
        case "ids":
            if not model_vocab_size:
                raise UserError("data.tokenizer 'ids' needs the number of ids: set --model.vocab-size")
            return WordTokenizer(str(i) for i in range(model_vocab_size))
        case "byte":
            return ByteTokenizer()
        case "gpt2":
            return _gpt2_from_hub()
        case "bpe":
            return train_bpe_on_sample(partial(_beginnings, texts), vocab_size, sum(map(len, texts)))
    return load_tokenizer(Path(kind))


def _beginnings(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    """Yield the beginnings of texts in pieces: `size` characters in total, divided in proportion to the texts' lengths."""
    total = sum(map(len, texts))
    for text in texts:
        length = math.ceil(len(text) * size / max(total, 1))
        yield cut(text[:length], GPT2_CUTS)


def _gpt2_from_hub() -> Tokenizer:
    """Return GPT-2's tokenizer; download it from the Hugging Face Hub if the cache lacks it."""
    try:
        directory = download(GPT2_REPO, ["tokenizer.json"], revision=GPT2_REVISION)
        return read_tokenizer_json(directory / "tokenizer.json")
    except UserError as e:
        raise UserError(f"the tokenizer gpt2: {e}") from None
