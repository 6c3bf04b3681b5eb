"""Opened data: the splits of a source, and facts about them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxgpt.config import Config
from jaxgpt.data.packing import Packed
from jaxgpt.data.source_kinds import RECORD_KINDS, Kind
from jaxgpt.data.text import Text
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.joined_texts import decode_texts
from jaxgpt.data.tokens import Split, Tokens
from jaxgpt.errors import UserError


@dataclass(frozen=True)
class Recorded:
    """Facts that checkpoints record next to the fingerprint of a source, to explain changes when a run is resumed.

    Attributes:
        boundary: number of training ids (token files) or of training files (records), if the names of the files determine
            the splits; otherwise None.
        files: digest of each file of a directory, keyed by relative path (`sources.file_digests`).
    """

    boundary: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """Training and validation data of a source; of a mixture of sources: `MixedData`."""

    train: Split
    val: Split  # validation split; same as `train` if nothing is held out
    held_out: bool  # whether `train` excludes `val`
    tokenizer: Tokenizer
    source: str  # one-line description
    fingerprint: str  # SHA-256 of the text, records or ids
    name: str = ""  # path of the data, or name of the built-in text
    kind: Kind | Literal["mixture"] = "text"  # content of the source
    text: Text | None = None  # text before tokenization; None for token files and records
    bos_ids: tuple[int, ...] = ()  # recorded beginning-of-text ids of the documents of prepared data
    recorded: Recorded = field(default_factory=Recorded)

    @property
    def sources(self) -> tuple[Data, ...]:
        """The data of each open source: only this source."""
        return (self,)

    @property
    def is_examples(self) -> bool:
        """Whether the rows are separate examples, such as conversations or pairs, not parts of texts; false for a mixture."""
        return self.kind in RECORD_KINDS

    @property
    def characters(self) -> int | None:
        """Number of characters of the texts of all sources; None if any source is not a text."""
        texts = [source.text.text for source in self.sources if source.text is not None]
        if len(texts) < len(self.sources):
            return None
        return sum(map(len, texts))

    def facts(self) -> dict[str, object]:
        """Return what must be equal in all processes, keyed by the words for the error of `same_on_all` (parallel)."""
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
        for source in self.sources:
            if not source.is_examples:
                source._check_length(config)
            source._check_ends(config)

    def _check_length(self, config: Config) -> None:
        """Raise `UserError` if a split of this source is shorter than a window and its last target."""
        needed = config.window + 1
        shortest = min(len(self.train), len(self.val))
        if shortest < needed:
            kind = "training" if shortest == len(self.train) else "validation"
            raise UserError(
                f"{config.window_setting} needs at least {needed} {kind} tokens, but there are {shortest} in {self.name}: "
                "lower it, change --data.train-fraction, or use a longer text"
            )

    def _check_ends(self, config: Config) -> None:
        """Raise `UserError` if `data.documents` separates documents, but the training ids of this source have no end."""
        # Only separated documents have `end_ids`: `Tokens` with `mask`, `Packed` documents of `Tokens` with `pack`.
        ids = self.train.tokens if isinstance(self.train, Packed) else self.train
        if not isinstance(ids, Tokens) or not ids.end_ids:
            return
        if not any(len(ends) for ends in ids.document_ends()):
            raise UserError(
                f"data.documents {config.data.documents} needs an end-of-text id after each document, but {self.name} "
                f"does not contain {' or '.join(map(str, ids.end_ids))}: use token files (.bin) with this id, or "
                "--data.documents flow"
            )
