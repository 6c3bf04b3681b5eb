"""Mixture of opened sources, as `data.mix` specifies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence

from jaxgpt.config import DataConfig
from jaxgpt.data.mixture import Mixture, Shares
from jaxgpt.data.opened import Data, Recorded
from jaxgpt.errors import UserError
from jaxgpt.mix import path_of, split_phases


def check_spellings(words: Sequence[str]) -> None:
    """Raise `UserError` if words of `data.mix` spell a path in two ways, such as `a` and `./a`: it would be two sources."""
    spelled: dict[str, str] = {}
    for phase in split_phases(words):
        for path in map(path_of, phase.words):
            other = spelled.setdefault(os.path.realpath(path), path)
            if other != path:
                raise UserError(f"data.mix lists the same data twice, as {other} and {path}: write the path in one way")


def mixed(data: DataConfig, parts: Mapping[str, Data]) -> Data:
    """Mix sources, keyed by path, as `data.mix` specifies; a source of mixtures that have ended may be missing.

    Validation uses the sources of the last mixture regardless of the weights, so losses for different weights are comparable.

    Raises:
        UserError: if some sources have document ids and others do not.
    """
    if len({part.train.has_documents for part in parts.values()}) > 1:
        raise UserError("data.mix has conversations, so other documents must be masked: add --data.documents mask")
    streams = data.stream_names
    ordered = {path: parts[path] for path in streams if path in parts}

    # Training: the mixtures in their order.
    schedule = []
    for phase in data.phases:
        schedule.append(Shares(phase.tokens, _by_stream(data.weights(phase), streams)))
    train = Mixture({streams[path]: part.train for path, part in ordered.items()}, schedule)

    # Validation: all held-out ids of the last mixture; if no source holds out ids, all ids of its sources.
    last = data.weights(data.phases[-1])
    val_parts = tuple(part for path, part in ordered.items() if path in last)
    held_out = any(part.held_out for part in val_parts)
    val = [part.val for part in val_parts if part.held_out or not held_out]
    fingerprint = joint_fingerprint([part.fingerprint for part in val_parts])
    return Data(
        train=train,
        val=Mixture.constant(val, [1] * len(val)),
        held_out=held_out,
        tokenizer=val_parts[0].tokenizer,
        source=_description(data, ordered),
        fingerprint=fingerprint,
        kind="mixture",
        bos_ids=tuple(i for part in val_parts for i in part.bos_ids),
        parts=tuple(ordered.values()),
        recorded=Recorded(fingerprints=tuple(part.fingerprint for part in ordered.values())),
    )


def joint_fingerprint(fingerprints: Sequence[str]) -> str:
    """Return the fingerprint of several sources."""
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()


def _by_stream(weights: Mapping[str, int], streams: Mapping[str, str]) -> dict[str, int]:
    """Key weights by stream instead of path, in the order of `streams`, which maps paths to streams."""
    return {stream: weights[path] for path, stream in streams.items() if path in weights}


def _description(data: DataConfig, parts: Mapping[str, Data]) -> str:
    """Describe in one line the mixtures that have all their sources open."""
    texts = []
    for phase in data.phases:
        weights = data.weights(phase)
        if not weights.keys() <= parts.keys():
            continue
        total = sum(weights.values())
        shares = "; ".join(f"{weight / total:.1%} {parts[path].source}" for path, weight in weights.items())
        texts.append(f"from {phase.tokens:,} tokens: {shares}" if phase.tokens else shares)
    return "; ".join(texts)
