"""The data of a run as checkpoint.json records them, and how a source of data has changed since the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxgpt.checkpoint.info import Info
from jaxgpt.data import Data


class DataRecord(NamedTuple):
    """The data of a run at a checkpoint.

    Attributes:
        fingerprint: fingerprint of all data together.
        sources: fingerprint of each source in the settings; None: not recorded (version 0.1.0).
        tokens: number of tokens of all data; None: not recorded.
        boundaries: `Recorded.boundary` of each source, keyed by fingerprint; empty: not recorded.
        files: `Recorded.files` of each source, keyed by fingerprint; empty: not recorded.
    """

    fingerprint: str
    sources: Sequence[str] | None
    tokens: int | None
    boundaries: Mapping[str, int | None]
    files: Mapping[str, Mapping[str, str]]

    @staticmethod
    def of(info: Info) -> DataRecord | None:
        """Return the data of a checkpoint; None for weights that were saved without a training run."""
        about = info.about
        if "data" not in about:
            return None
        return DataRecord(
            fingerprint=about["data"],
            sources=about.get("sources"),
            tokens=about.get("data_tokens"),
            boundaries=about.get("boundaries", {}),
            files=about.get("files", {}),
        )

    @property
    def first_source(self) -> str:
        """Fingerprint of the first source, or of all data if sources are not recorded."""
        return self.fingerprint if self.sources is None else self.sources[0]

    def change(self, recorded: str, source: Data) -> str:
        """Describe a changed source of a mixture and its changes since the checkpoint; "": unchanged.

        Args:
            recorded: fingerprint of the source at the checkpoint.
            source: the present source.
        """
        if recorded != source.fingerprint:
            return source.source + self._changed_files(recorded, source)
        if self._has_other_split(source):
            return f"{source.source}; other files are for validation now"
        return ""

    def change_of_all(self, recorded: str, data: Data) -> str:
        """Describe changed data, like `change`, with the numbers of tokens then and now; arguments as in `change`."""
        if recorded != data.fingerprint:
            return data.source + self._changed_size(data) + self._changed_files(recorded, data)
        return self.change(recorded, data)

    def _has_other_split(self, source: Data) -> bool:
        """Return whether renamed files have changed the split of a source; the content of all files together is unchanged."""
        boundary = source.recorded.boundary
        return self.boundaries.get(source.fingerprint, boundary) != boundary

    def _changed_size(self, data: Data) -> str:
        """Return the numbers of tokens at the checkpoint and now if they differ and were recorded, otherwise ""."""
        now = token_count(data)
        if self.tokens is None or self.tokens == now:
            return ""
        return f" ({self.tokens:,} tokens then, {now:,} now)"

    def _changed_files(self, recorded: str, source: Data) -> str:
        """Describe the added, removed and changed files of a source; "": not recorded. Arguments as in `change`."""
        old = self.files.get(recorded, {})
        new = source.recorded.files
        if not old or not new:
            return ""
        changes = {
            "added": new.keys() - old.keys(),
            "removed": old.keys() - new.keys(),
            "changed": {name for name in new.keys() & old.keys() if new[name] != old[name]},
        }
        notes = []
        for change, names in changes.items():
            if names:
                others = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
                notes.append(f"{change}: {min(names)}{others}")
        return f"; {'; '.join(notes)}" if notes else ""


def about_data(data: Data) -> dict[str, object]:
    """Return the entries of checkpoint.json that identify the data of its run; `DataRecord.of` reads them."""
    sources = list(data.recorded.fingerprints) or [data.fingerprint]
    parts = data.parts or (data,)
    return {
        "data": data.fingerprint,
        "sources": sources,
        "data_tokens": token_count(data),
        "boundaries": {part.fingerprint: part.recorded.boundary for part in parts},
        "held_out": data.held_out,
        "files": {part.fingerprint: dict(part.recorded.files) for part in parts},
    }


def token_count(data: Data) -> int:
    """Return the number of tokens; a validation split that is not held out is a part of the training split."""
    tokens = len(data.train)
    if data.held_out:
        tokens += len(data.val)
    return tokens
