"""The data of a run as checkpoint.json records them, and messages about later changes of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxgpt.checkpoint.info import About, Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import DataConfig
from jaxgpt.data import Data
from jaxgpt.data.mixed_sources import MixedData


@dataclass(frozen=True)
class DataRecord:
    """The data of a run at a checkpoint, which checkpoint.json records (`about_data`).

    Attributes:
        run: the run.
        info: contents of the checkpoint.json.
    """

    run: Run
    info: Info

    @staticmethod
    def of(run: Run | None, info: Info | None) -> DataRecord | None:
        """Return the data at a checkpoint; None for a new run and for weights that were saved without a training run."""
        if run is None or info is None or "data" not in info.about:
            return None
        return DataRecord(run, info)

    @property
    def settings(self) -> DataConfig:
        """Settings of the data at the checkpoint."""
        return self.info.config().data

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all data together."""
        return self.info.about["data"]

    @property
    def sources(self) -> Sequence[str] | None:
        """Fingerprint of each source in the settings; None: not recorded (version 0.1.0)."""
        return self.info.about.get("sources")

    @property
    def by_path(self) -> dict[str, str] | None:
        """Fingerprint of each source, keyed by its path at the checkpoint; None: not recorded (version 0.1.0)."""
        if self.sources is not None:
            paths = [source.path for source in self.settings.sources]
            return dict(zip(paths, self.sources, strict=True))
        if not self.settings.mix:
            return {self.settings.path: self.fingerprint}
        return None

    @property
    def first_source(self) -> str:
        """Fingerprint of the first source, or of all data if sources are not recorded."""
        return self.fingerprint if self.sources is None else self.sources[0]

    def message(self, description: str) -> str:
        """Return the message that the data have changed since the checkpoint; `description`: the changed source."""
        return f"the data of {self.run.path} has changed since step {self.info.step}: {description}"

    def change_of_source(self, recorded: str, source: Data) -> str:
        """Return the message if a source of a mixture has changed since the checkpoint, otherwise "".

        Args:
            recorded: fingerprint of the source at the checkpoint.
            source: the present source.
        """
        if recorded != source.fingerprint:
            return self.message(source.source + self._changed_files(recorded, source))
        if self._has_other_split(source):
            return self.message(f"{source.source}; other files are for validation now")
        return ""

    def change_of_all(self, recorded: str, data: Data) -> str:
        """Like `change_of_source`, for all data together: the message includes the numbers of tokens if they differ."""
        if recorded != data.fingerprint:
            return self.message(data.source + self._changed_size(data) + self._changed_files(recorded, data))
        return self.change_of_source(recorded, data)

    def _has_other_split(self, source: Data) -> bool:
        """Return whether renamed files have changed the split of a source; the content of all files together is unchanged."""
        boundary = source.recorded.boundary
        boundaries = self.info.about.get("boundaries", {})
        return boundaries.get(source.fingerprint, boundary) != boundary

    def _changed_size(self, data: Data) -> str:
        """Return the numbers of tokens at the checkpoint and now if they differ and were recorded, otherwise ""."""
        then = self.info.about.get("data_tokens")
        now = token_count(data)
        if then is None or then == now:
            return ""
        return f" ({then:,} tokens then, {now:,} now)"

    def _changed_files(self, recorded: str, source: Data) -> str:
        """Describe the added, removed and changed files of a source; "": not recorded. Arguments as in `change_of_source`."""
        old = self.info.about.get("files", {}).get(recorded, {})
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


def about_data(data: Data) -> About:
    """Return the entries of checkpoint.json that identify the data of its run; `DataRecord` reads them."""
    fingerprints = data.all_fingerprints if isinstance(data, MixedData) else (data.fingerprint,)
    return {
        "data": data.fingerprint,
        "sources": list(fingerprints),
        "data_tokens": token_count(data),
        "boundaries": {source.fingerprint: source.recorded.boundary for source in data.sources},
        "held_out": data.held_out,
        "files": {source.fingerprint: dict(source.recorded.files) for source in data.sources},
    }


def token_count(data: Data) -> int:
    """Return the number of tokens; a validation split that is not held out is a part of the training split."""
    tokens = len(data.train)
    if data.held_out:
        tokens += len(data.val)
    return tokens
