"""Opened data: the splits of a source, and the mixture of several opened sources."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxgpt.config import Config, DataConfig
from jaxgpt.data.mixture import Mixture, Shares
from jaxgpt.data.packing import Packed
from jaxgpt.data.preferences import Preferences
from jaxgpt.data.prompts import PromptSplit
from jaxgpt.data.text import Text
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import decode_texts
from jaxgpt.data.tokens import Split, Tokens
from jaxgpt.errors import UserError


@dataclass(frozen=True)
class Recorded:
    """Facts that checkpoints record next to the fingerprint of the data, to explain changes when a run is resumed.

    Attributes:
        fingerprints: one for each source of a mixture; empty: no mixture. A new run records the open sources (`Data.parts`),
            a resumed run all sources in its settings.
        boundary: number of training ids (token files) or of training files (records), if the names of the files determine
            the splits; otherwise None.
        files: digest of each file of a directory, keyed by relative path (`sources.file_digests`).
    """

    fingerprints: tuple[str, ...] = ()
    boundary: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """Training and validation data: a source, or a mixture of sources."""

    train: Split
    val: Split  # validation split; same as `train` if nothing is held out
    held_out: bool  # whether `train` excludes `val`
    tokenizer: Tokenizer
    source: str  # one-line description
    fingerprint: str  # SHA-256 of the text, records or ids; for a mixture, of the fingerprints of `val_parts`
    name: str = ""  # path of the data, or name of the built-in text; empty for a mixture
    text: Text | None = None  # text before tokenization; None for token files, records and mixtures
    bos_ids: tuple[int, ...] = ()  # recorded beginning-of-text ids of the documents of prepared data
    parts: tuple[Data, ...] = ()  # data of each open source of a mixture, in the order of `train.sources`
    recorded: Recorded = field(default_factory=Recorded)

    @property
    def val_parts(self) -> tuple[Data, ...]:
        """The data of the sources of the last mixture; () if the data is a single source."""
        if not isinstance(self.train, Mixture):
            return ()
        return tuple(part for part, weight in zip(self.parts, self.train.weights, strict=True) if weight)

    @property
    def is_conversations(self) -> bool:
        """Whether only the assistant's tokens are targets; false for a mixture."""
        return isinstance(self.train, Packed) and self.train.is_target is not None

    @property
    def is_preferences(self) -> bool:
        """Whether the rows are preference pairs; false for a mixture."""
        return isinstance(self.train, Preferences)

    @property
    def is_prompts(self) -> bool:
        """Whether the rows are prompts for rollouts, which a mixture cannot have."""
        return isinstance(self.train, PromptSplit)

    @property
    def is_examples(self) -> bool:
        """Whether the rows are separate examples, such as conversations or pairs, not parts of texts; false for a mixture."""
        return self.is_conversations or not isinstance(self.train, (Tokens, Packed, Mixture))

    @property
    def characters(self) -> int:
        """Number of characters of the text; 0 if any part is not text."""
        sizes = [len(part.text.text) if part.text else 0 for part in self.parts or (self,)]
        return sum(sizes) if all(sizes) else 0

    def facts(self) -> dict[str, object]:
        """Return the values, keyed by description, that must be equal in all processes."""
        tokenizer = self.tokenizer.to_json().encode()
        return {
            "the number of training ids": len(self.train),
            "the number of validation ids": len(self.val),
            "the fingerprint of the data": self.fingerprint,
            "the SHA-256 of the tokenizer": hashlib.sha256(tokenizer).hexdigest(),
        }

    def decode(self, split: Split, start: int, n: int) -> str:
        """Decode at most n ids of a split from index `start`, without the ids that the encoder added (`bos.decode_texts`)."""
        ids = split.take(start, max(min(n, len(split) - start), 0))
        if self.text is not None:  # encoding a text adds no ids
            return self.tokenizer.decode(ids)
        return decode_texts(self.tokenizer, ids, self.bos_ids)

    def check(self, config: Config) -> None:
        """Check that a model can be trained on this data.

        Raises:
            UserError: if a split of texts has fewer than T + 1 ids, or the training ids lack the end-of-text ids that
                `data.documents` needs.
        """
        for part in self.parts or (self,):
            if not part.is_examples:
                part._check_length(config)
            part._check_ends(config)

    def _check_length(self, config: Config) -> None:
        """Raise `UserError` if a split of a source is shorter than a window and its last target."""
        needed = config.window + 1
        shortest = min(len(self.train), len(self.val))
        if shortest < needed:
            kind = "training" if shortest == len(self.train) else "validation"
            raise UserError(
                f"{config.window_setting} needs at least {needed} {kind} tokens, but there are {shortest} in {self.name}: "
                f"lower it, change --data.train-fraction, or use a longer text"
            )

    def _check_ends(self, config: Config) -> None:
        """Raise `UserError` if `data.documents` separates documents, but the training ids of a source have no end."""
        ids = self.train.tokens if isinstance(self.train, Packed) else self.train
        if not isinstance(ids, Tokens) or not ids.end_ids:
            return
        if not any(len(ends) for ends in ids.document_ends()):
            raise UserError(
                f"data.documents {config.data.documents} needs an end-of-text id after each document, but {self.name} "
                f"does not contain {' or '.join(map(str, ids.end_ids))}: use token files (.bin) with this id, or "
                f"--data.documents flow"
            )


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

    # Validation: all held-out ids of the last mixture; if no source holds out ids, all its ids.
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
