"""Write and read tokenizers of characters and bytes as llama.cpp's RWKV tokenizer, which finds the longest token.

Unlike other tokenizers of llama.cpp, the RWKV tokenizer has no default special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxgpt.convert.gguf.vocabulary import GGML, NORMAL, OTHER, UNUSED, Vocabulary, read_vocabulary
from jaxgpt.data.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.errors import UserError

BYTES = [bytes([value]) for value in range(256)]


def describe_longest_match(tokenizer: ByteTokenizer | CharTokenizer) -> Vocabulary:
    """Return the vocabulary of a file with a tokenizer of characters or bytes."""
    texts = BYTES
    if isinstance(tokenizer, CharTokenizer):
        texts = [character.encode() for character in tokenizer.words]
    tokens = [escaped(text) for text in texts]
    return Vocabulary(tokens, types=[NORMAL for _ in tokens], scores=[], merges=[])


def read_longest_match(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer of characters or bytes of a file that jaxgpt exported; raise `UserError` for other tokens."""
    vocabulary = read_vocabulary(metadata, where)
    typed = zip(vocabulary.tokens, vocabulary.types, strict=True)
    texts = [_unescaped(token) for token, kind in typed if kind != UNUSED]
    if texts == BYTES:
        return ByteTokenizer()

    other = UserError(f"{where}: {GGML}model 'rwkv' is supported only for characters and bytes; {OTHER}")
    try:
        characters = [text.decode() for text in texts]
    except UnicodeDecodeError:
        raise other from None
    tokenizer = CharTokenizer(characters)
    if tokenizer.words != characters or any(len(character) != 1 for character in characters):
        raise other
    return tokenizer


def escaped(text: bytes) -> str:
    """Write a token as llama.cpp's RWKV tokenizer reads it: printable ASCII except quotes and \\, other bytes as `\\x0a`."""
    plain = set(range(32, 127)) - set(b"\\'\"")
    return "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in text)


def _unescaped(token: str) -> bytes:
    """Invert `escaped`."""
    parts = re.split(r"\\x([0-9a-f]{2})", token)  # text and hexadecimal digits in alternation
    return b"".join(bytes([int(part, 16)]) if i % 2 else part.encode() for i, part in enumerate(parts))
