"""Data of a mixture of opened sources, as `data.mix` specifies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxgpt.config import DataConfig
from jaxgpt.data.mixture import Mixture, Shares
from jaxgpt.data.opened import Data
from jaxgpt.errors import UserError
from jaxgpt.mix import path_of, split_phases


@dataclass(frozen=True, kw_only=True)
class MixedData(Data):
    """Training and validation data of a mixture of sources; `fingerprint` depends on the fingerprints of `val_parts`.

    Attributes:
        parts: data of each open source, in the order of `train.sources`.
        val_parts: the parts in the last mixture.
        evaluated_parts: the parts in `val`: the `val_parts` that hold out ids, or all `val_parts` if no source holds out ids.
        all_fingerprints: fingerprints that checkpoints record: in a new run, of `parts`; in a resumed run, of all sources in
            its settings.
    """

    train: Mixture
    parts: tuple[Data, ...]
    val_parts: tuple[Data, ...]
    evaluated_parts: tuple[Data, ...]
    all_fingerprints: tuple[str, ...]

    @property
    def sources(self) -> tuple[Data, ...]:
        """The data of each open source."""
        return self.parts


def check_spellings(words: Sequence[str]) -> None:
    """Raise `UserError` if words of `data.mix` spell a path in two ways, such as `a` and `./a`: it would be two sources."""
    spelled: dict[str, str] = {}
    for phase in split_phases(words):
        for path in map(path_of, phase.words):
            other = spelled.setdefault(os.path.realpath(path), path)
            if other != path:
                raise UserError(f"data.mix lists the same data twice, as {other} and {path}: write the path in one way")


def mixed(config: DataConfig, parts: Mapping[str, Data]) -> MixedData:
    """Mix sources, keyed by path, as `data.mix` specifies; a source of mixtures that have ended may be missing.

    Validation uses the sources of the last mixture regardless of the weights, so losses for different weights are comparable.

    Raises:
        UserError: if some sources have document ids and others do not.
    """
    if len({part.train.has_documents for part in parts.values()}) > 1:
        raise UserError("data.mix has conversations, so other documents must be masked: add --data.documents mask")
    streams = config.stream_names  # random stream of each path
    opened = {path: parts[path] for path in streams if path in parts}

    # Training: the mixtures in their order. A mixture identifies its sources by stream, in a fixed order.
    schedule = []
    for phase in config.phases:
        weights = config.weights(phase)
        by_stream = {stream: weights[path] for path, stream in streams.items() if path in weights}
        schedule.append(Shares(phase.tokens, by_stream))
    train = Mixture({streams[path]: part.train for path, part in opened.items()}, schedule)

    # Validation: all held-out ids of the last mixture; if no source holds out ids, all ids of its sources.
    last = config.weights(config.phases[-1])
    val_parts = tuple(part for path, part in opened.items() if path in last)
    held_out_parts = tuple(part for part in val_parts if part.held_out)
    evaluated_parts = held_out_parts or val_parts
    val = Mixture.constant([part.val for part in evaluated_parts], [1] * len(evaluated_parts))

    return MixedData(
        train=train,
        val=val,
        held_out=bool(held_out_parts),
        tokenizer=val_parts[0].tokenizer,
        source=_description(config, opened),
        fingerprint=joint_fingerprint([part.fingerprint for part in val_parts]),
        kind="mixture",
        bos_ids=tuple(i for part in val_parts for i in part.bos_ids),
        parts=tuple(opened.values()),
        val_parts=val_parts,
        evaluated_parts=evaluated_parts,
        all_fingerprints=tuple(part.fingerprint for part in opened.values()),
    )


def joint_fingerprint(fingerprints: Sequence[str]) -> str:
    """Return the fingerprint of several sources."""
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()


def _description(config: DataConfig, opened: Mapping[str, Data]) -> str:
    """Describe in one line the mixtures that have all their sources open; `opened` is keyed by path."""
    texts = []
    for phase in config.phases:
        weights = config.weights(phase)
        if not weights.keys() <= opened.keys():
            continue
        total = sum(weights.values())
        shares = "; ".join(f"{weight / total:.1%} {opened[path].source}" for path, weight in weights.items())
        texts.append(f"from {phase.tokens:,} tokens: {shares}" if phase.tokens else shares)
    return "; ".join(texts)
