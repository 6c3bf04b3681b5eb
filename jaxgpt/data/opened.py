"""Opened data: the splits of a source or of a mixture, and facts about them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxgpt.config import Config
from jaxgpt.data.mixture import Mixture
from jaxgpt.data.packing import Packed
from jaxgpt.data.source_kinds import RECORD_KINDS, Kind
from jaxgpt.data.text import Text
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.joined_texts import decode_texts
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
    kind: Kind | Literal["mixture"] = "text"  # what the source holds
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
    def is_examples(self) -> bool:
        """Whether the rows are separate examples, such as conversations or pairs, not parts of texts; false for a mixture."""
        return self.kind in RECORD_KINDS

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
        """Decode at most n ids of a split from index `start`, without the ids that the encoder added (`decode_texts`)."""
        ids = split.take(start, max(min(n, len(split) - start), 0))
        if self.text is not None:  # encoding a text adds no ids
            return self.tokenizer.decode(ids)
        return decode_texts(self.tokenizer, ids, self.bos_ids)

    def check(self, config: Config) -> None:
        """Check that a model can be trained on this data.

        Raises:
            UserError: if a split of texts or token ids has fewer than T + 1 ids, or the training ids lack the end-of-text ids
                that `data.documents` needs.
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
