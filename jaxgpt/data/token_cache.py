"""Encode a text and cache the ids, which are memory-mapped the next time."""

from __future__ import annotations

import hashlib
import io
from contextlib import suppress
from importlib.metadata import version

import numpy as np

from jaxgpt.data.cuts import cut
from jaxgpt.data.text import Progress, Text, no_progress
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.data.tokens import Tokens
from jaxgpt.files import cache_dir, locked, write_atomically

CACHED = 1 << 20  # bytes of the shortest text with cached ids; shorter ones are encoded within a second
TOGETHER = 64  # pieces to encode at a time, on all cores


def encode_text(tokenizer: Tokenizer, text: Text, progress: Progress = no_progress) -> Tokens:
    """Encode a text, or load its ids from `cache_dir()/tokens`, which can be deleted at any time.

    The ids of a byte tokenizer are the text itself. Characters and short texts are not cached: encoding them is fast.

    Args:
        tokenizer: the tokenizer.
        text: the text to encode.
        progress: called with the number of characters encoded so far and the total.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return Tokens([np.frombuffer(text.data, np.uint8)])
    if isinstance(tokenizer, CharTokenizer) or len(text.data) < CACHED:
        return Tokens([_encode(tokenizer, text.text, progress)])
    key = "\0".join((version("tokenizers"), tokenizer.to_json(), text.sha256))
    path = cache_dir() / "tokens" / f"{hashlib.sha256(key.encode()).hexdigest()}.npy"
    ids: np.ndarray | None = None
    with suppress(OSError):  # the file system is read-only or full
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):  # one process encodes, the others wait
            if path.exists():
                return Tokens([np.load(path, mmap_mode="r", allow_pickle=False)])
            ids, file = _encode(tokenizer, text.text, progress), io.BytesIO()
            np.save(file, ids, allow_pickle=False)
            write_atomically(path, file.getvalue())
    return Tokens([_encode(tokenizer, text.text, progress) if ids is None else ids])


def _encode(tokenizer: Tokenizer, text: str, progress: Progress) -> np.ndarray:
    """Encode a text in the smallest sufficient dtype."""
    dtype = np.min_scalar_type(max(tokenizer.vocab_size - 1, 0))
    pieces, parts, done = cut(text, tokenizer.cuts), [], 0
    for start in range(0, len(pieces), TOGETHER):
        piece = "".join(pieces[start : start + TOGETHER])
        parts.append(tokenizer.encode(piece).astype(dtype))
        done += len(piece)
        progress(done, len(text))
    return np.concatenate(parts)
