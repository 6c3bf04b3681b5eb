"""Data of a run: open them where they are now, and compare each source with a checkpoint by its content.

Within a schedule of mixtures, a path identifies a source. Data that have moved keep their identity, because checkpoints record
the fingerprint of each source: the new path replaces the old one in the whole schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from jaxgpt.checkpoint.data_record import DataRecord
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config, DataConfig
from jaxgpt.data import Data, Mixture, open_data
from jaxgpt.data.opened import Recorded, joint_fingerprint, mixed
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.mix import same_shares, with_paths
from jaxgpt.progress import NO_PROGRESS, Progress


class RunData(NamedTuple):
    """The data of a run.

    Attributes:
        config: settings with the new paths of sources that have moved.
        data: data for these settings.
        change: description of how the data have changed since the checkpoint; "": equal, or not recorded.
    """

    config: Config
    data: Data
    change: str


def open_run_data(
    run: Run | None,
    info: Info | None,
    config: Config,
    tokenizer: Tokenizer | None,
    progress: Progress = NO_PROGRESS,
    tokens: int = 0,
) -> RunData:
    """Open the data of a run, and compare them with the data at a checkpoint.

    Args:
        run: the run; None: a new run.
        info: contents of the checkpoint.json; None: nothing to compare with.
        config: settings of the run; `config.data` may be a part of its schedule of mixtures, or continue it.
        tokenizer: tokenizer of the run; None: as in `open_data`.
        progress: as in `open_data`.
        tokens: number of training tokens so far; the sources of mixtures that have ended are not opened.

    Raises:
        UserError: as in `open_data`.
    """

    def open_source(source: DataConfig) -> Data:
        return open_data(replace(config, data=source), tokenizer, progress)

    data = open_data(config, tokenizer, progress, tokens)
    record = DataRecord.of(info) if info else None
    if run is None or info is None or record is None:
        return RunData(config, data, "")
    if data.parts:
        return compare_mixture(run, info, config, data, open_source)
    change = record.change_of_all(record.first_source, data)
    return RunData(config, data, _description(run, info, change))


def compare_given(run: Run | None, info: Info | None, config: Config, data: Data) -> RunData:
    """Compare data that the caller has opened, as a whole, with the data at a checkpoint.

    Args:
        run, info, config: as in `open_run_data`.
        data: the opened data.
    """
    record = DataRecord.of(info) if info else None
    if run is None or info is None or record is None:
        return RunData(config, data, "")
    change = record.change_of_all(record.fingerprint, data)
    return RunData(config, data, _description(run, info, change))


def compare_mixture(
    run: Run, info: Info, config: Config, data: Data, open_source: Callable[[DataConfig], Data]
) -> RunData:
    """Compare the open sources of a mixture with the sources at a checkpoint, by content.

    Args:
        run, config: as in `open_run_data`.
        info: contents of the checkpoint.json, which records the data.
        data: the mixture.
        open_source: function that opens a single source.
    """
    record = DataRecord.of(info)
    assert record is not None
    parts = _by_path(config.data, data)
    known = known_fingerprints(info.config().data, record, data, parts, open_source)
    if known is None:
        return RunData(config, data, _description(run, info, data.source))
    for path, part in parts.items():
        recorded = known.get(path, part.fingerprint)
        change = record.change(recorded, part)
        if change:
            return RunData(config, data, _description(run, info, change))

    current = {path: part.fingerprint for path, part in parts.items()}
    moved = moved_sources(known, current)
    config = replace(config, data=_with_moved(config.data, moved, info.tokens))
    if not config.data.mix:
        return RunData(config, parts[config.data.path], "")

    # The sources of mixtures that have ended are not open: their fingerprints come from the checkpoint.
    fingerprints = {moved.get(path, path): fingerprint for path, fingerprint in known.items()}
    fingerprints |= current
    of_sources = tuple(fingerprints[source.path] for source in config.data.sources)
    mixture = replace(mixed(config.data, parts), recorded=Recorded(fingerprints=of_sources))
    return RunData(config, mixture, "")


def known_fingerprints(
    old: DataConfig,
    record: DataRecord,
    data: Data,
    parts: Mapping[str, Data],
    open_source: Callable[[DataConfig], Data],
) -> dict[str, str] | None:
    """Return the fingerprint of each source at a checkpoint, keyed by its path in the checkpoint; None: some have changed.

    Args:
        old: settings of the data at the checkpoint.
        record: the data at the checkpoint.
        data: the present mixture.
        parts: the open sources of the present mixture, keyed by path.
        open_source: function that opens a single source.
    """
    paths = [source.path for source in old.sources]
    if record.sources is not None:
        return dict(zip(paths, record.sources, strict=True))
    if not old.mix:
        return {old.path: record.fingerprint}

    # Version 0.1.0 recorded one fingerprint of all sources. If all have moved, their order identifies them.
    current = [part.fingerprint for part in data.val_parts]
    if len(current) == len(paths) and joint_fingerprint(current) == record.fingerprint:
        return dict(zip(paths, current, strict=True))

    # Otherwise the sources are at their old paths.
    found = {}
    for source in old.sources:
        part = parts[source.path] if source.path in parts else open_source(source)
        found[source.path] = part.fingerprint
    if joint_fingerprint(list(found.values())) != record.fingerprint:
        return None
    return found


def moved_sources(known: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """Map the old paths of sources to new paths with the same fingerprint.

    Args:
        known: fingerprints of the sources of the checkpoint, keyed by path.
        current: fingerprints of the sources of the mixtures that have not ended, keyed by path.
    """
    gone = {path: fingerprint for path, fingerprint in known.items() if path not in current}
    moved: dict[str, str] = {}
    for path, fingerprint in current.items():
        if path in known:
            continue
        matches = [old for old, old_fingerprint in gone.items() if old_fingerprint == fingerprint and old not in moved]
        if matches:
            moved[matches[0]] = path
    return moved


def _description(run: Run, info: Info, change: str) -> str:
    """Describe a change (`DataRecord.change`) since a checkpoint of a run; "": no change."""
    return f"the data of {run.path} has changed since step {info.step}: {change}" if change else ""


def _by_path(config: DataConfig, data: Data) -> dict[str, Data]:
    """Key the open sources of a mixture by path."""
    assert isinstance(data.train, Mixture)
    paths = {stream: path for path, stream in config.stream_names.items()}
    return {paths[stream]: part for stream, part in zip(data.train.streams, data.parts, strict=True)}


def _with_moved(data: DataConfig, moved: Mapping[str, str], tokens: int) -> DataConfig:
    """Replace the paths of sources, and drop a mixture that begins at `tokens` but then equals the previous mixture."""
    data = replace(data, path=moved.get(data.path, data.path), mix=with_paths(data.mix, moved))
    phases = data.phases
    begins_here = len(phases) > 1 and phases[-1].tokens == tokens
    if begins_here and same_shares(data.weights(phases[-2]), data.weights(phases[-1])):
        phases.pop()
    return data.with_phases(phases)
