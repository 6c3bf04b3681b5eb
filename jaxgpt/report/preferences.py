"""Describe preference pairs: lengths, duplicates, contradictions, and how often the chosen answer is longer."""

from __future__ import annotations

from collections import Counter
from typing import TypedDict

import numpy as np

from jaxgpt.data import Data, Preferences
from jaxgpt.data.preferences import key_of, prompt_ids


class Lengths(TypedDict):
    """Statistics of lengths in tokens."""

    mean: float
    median: float
    p95: float
    max: int


class PairsDescription(TypedDict):
    """Description of preference pairs, for JSON."""

    source: str
    train_pairs: int
    validation_pairs: int
    duplicate_pairs: int  # pairs that equal an earlier pair
    contradictions: int  # pairs that also occur with chosen and rejected answers swapped
    prompts: int  # number of different prompts
    shared_prompts: int  # validation pairs with a prompt of a training pair
    longer_chosen: float  # fraction of pairs with more tokens in the chosen answer than in the rejected answer
    lengths: dict[str, Lengths]  # keyed by prompt, chosen, rejected
    longest: int  # tokens of the longest text


def describe_preferences(data: Data) -> PairsDescription:
    """Describe preference pairs that are not a mixture."""
    assert isinstance(data.train, Preferences)
    assert isinstance(data.val, Preferences)
    train = list(data.train.pairs)
    held_out = list(data.val.pairs) if data.held_out else []
    pairs = [*train, *held_out]

    # Count equal and contradicting pairs.
    keys = Counter(key_of(pair) for pair in pairs)
    contradictions = 0
    for (chosen, rejected), count in keys.items():
        if (rejected, chosen) in keys:
            contradictions += count

    # Count the held-out pairs with a prompt of a training pair.
    prompts = [prompt_ids(pair.chosen) for pair in pairs]
    as_bytes = [prompt.tobytes() for prompt in prompts]
    in_training = set(as_bytes[: len(train)])
    shared = sum(prompt in in_training for prompt in as_bytes[len(train) :])

    # Measure lengths in tokens.
    prompt_lengths = np.array([len(prompt) for prompt in prompts])
    chosen_lengths = np.array([pair.chosen.is_target.sum() for pair in pairs])
    rejected_lengths = np.array([pair.rejected.is_target.sum() for pair in pairs])
    longest = max(len(text.ids) for pair in pairs for text in pair)

    # Pairs are described regardless of windows: omit the part about windows.
    source = [part for part in data.source.split("; ") if not part.startswith("windows ")]
    return {
        "source": "; ".join(source),
        "train_pairs": len(train),
        "validation_pairs": len(held_out),
        "duplicate_pairs": len(pairs) - len(keys),
        "contradictions": contradictions,
        "prompts": len(set(as_bytes)),
        "shared_prompts": shared,
        "longer_chosen": float(np.mean(chosen_lengths > rejected_lengths)),
        "lengths": {
            "prompt": _statistics(prompt_lengths),
            "chosen": _statistics(chosen_lengths),
            "rejected": _statistics(rejected_lengths),
        },
        "longest": longest,
    }


def _statistics(values: np.ndarray) -> Lengths:
    """Compute the statistics of lengths."""
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p95": float(np.percentile(values, 95)),
        "max": int(values.max()),
    }
