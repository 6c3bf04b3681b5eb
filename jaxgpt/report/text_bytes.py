"""Bytes of validation text: the number per token, and their size after compression."""

from __future__ import annotations

import zlib

import numpy as np

from jaxgpt.data import Data
from jaxgpt.data.mixed_sources import MixedData
from jaxgpt.report.blocks import sample

COMPRESSED = 1 << 20  # maximum bytes of validation text to compress
DECODED = 1 << 18  # tokens to decode at a time


def bytes_per_token(data: Data, limit: int = 1 << 62) -> float:
    """Return bytes per validation token, computed on up to `limit` tokens per source.

    The result is 0 (unknown) for conversations, pairs, prompts, word tokenizers, and text with the unknown token.
    """
    if isinstance(data, MixedData):
        ratios = [bytes_per_token(part, limit) for part in data.evaluated_parts]
        if not all(ratios):
            return 0.0
        sizes = [len(part.val) for part in data.evaluated_parts]
        return float(np.average(ratios, weights=sizes))
    if data.is_examples or data.tokenizer.separator:
        return 0.0

    unknown = data.tokenizer.unknown_id
    total_bytes = 0
    total_tokens = 0
    for start, n in sample(len(data.val), limit):
        end = start + n
        for begin in range(start, end, DECODED):
            size = min(DECODED, end - begin)
            if unknown is not None and unknown in data.val.take(begin, size):
                return 0.0
            text = data.decode(data.val, begin, size)
            total_bytes += len(text.encode())
        total_tokens += n
    return total_bytes / total_tokens


def compressed_bits(data: Data) -> float:
    """Compress validation text, at most its first `COMPRESSED` bytes (DEFLATE, level 9); return bits per byte."""
    text = data.decode(data.val, 0, COMPRESSED).encode()[:COMPRESSED]
    compressed = zlib.compress(text, 9, wbits=-15)
    return 8 * len(compressed) / len(text)
