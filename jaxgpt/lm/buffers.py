"""Token buffers for prompts of any number and length, in few sizes: the numbers of rows and slots are rounded up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.ops.attention import NO_TOKEN


def round_up(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least n and at least `least`."""
    return 1 << (max(n, least) - 1).bit_length()


class BufferSizes(NamedTuple):
    """Sizes of the token buffer of a batch, rounded up so that prompts of similar sizes share a compiled program.

    Attributes:
        rows: number of rows.
        prompt: slots of a row for its prompt.
        text: slots of a row for the prompt and the new tokens.
    """

    rows: int
    prompt: int
    text: int


def buffer_sizes(prompts: Sequence[Sequence[int]], limits: Sequence[int], ways: int = 1) -> BufferSizes:
    """Return the sizes of the buffer for prompts, and for at most `limits` new tokens of each.

    If there is more than one row, their number is a multiple of `ways`, the number of shards of a batch.
    """
    longest = max(len(prompt) for prompt in prompts)
    rows = round_up(len(prompts))
    if rows > 1:
        rows = math.ceil(rows / ways) * ways
    prompt_slots = round_up(longest - 1, 8) + 1  # `prefill` reads all tokens of a prompt except the last
    new_slots = round_up(max(limits), 64)
    return BufferSizes(rows=rows, prompt=prompt_slots, text=prompt_slots + new_slots)


def left_pad(prompts: Sequence[Sequence[int]], sizes: BufferSizes) -> TokenBuffer:
    """Stack prompts, padded on the left to `sizes.prompt` slots; the rows after the prompts are empty."""
    P = sizes.prompt
    ids_BP = np.full((sizes.rows, P), NO_TOKEN, np.int32)
    for row, ids in enumerate(prompts):
        ids_BP[row, P - len(ids) :] = ids
    return TokenBuffer(ids_BP, np.int32(P))  # type: ignore[arg-type]
