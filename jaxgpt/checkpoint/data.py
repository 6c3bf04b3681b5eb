"""Data of a run: open them where they are now, and compare each source with a checkpoint by its content.

Within a schedule of mixtures, a path identifies a source. Data that have moved keep their identity, because checkpoints record
the fingerprint of each source: the new path replaces the old path in the complete schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from jaxgpt.checkpoint.data_record import DataRecord
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config, DataConfig
from jaxgpt.data import Data, open_data
from jaxgpt.data.mixed_sources import MixedData, joint_fingerprint, mixed
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.mix import same_shares, with_paths
from jaxgpt.progress import NO_PROGRESS, Progress


class RunData(NamedTuple):
    """The data of a run.

    Attributes:
        config: settings with the new paths of sources that have moved.
        data: data for these settings.
        change: message that the data have changed since the checkpoint; "": equal, or not recorded.
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
    record = DataRecord.of(run, info)
    if record is None:
        return RunData(config, data, "")
    if isinstance(data, MixedData):
        return compare_mixture(record, config, data, open_source)
    # A run with mixtures may have started with this source.
    change = record.change_of_all(record.first_source, data)
    return RunData(config, data, change)


def compare_given(run: Run | None, info: Info | None, config: Config, data: Data) -> RunData:
    """Compare data that the caller has opened with all data at a checkpoint, not source by source.

    Args:
        run, info, config: as in `open_run_data`.
        data: the opened data.
    """
    record = DataRecord.of(run, info)
    change = record.change_of_all(record.fingerprint, data) if record else ""
    return RunData(config, data, change)


def compare_mixture(
    record: DataRecord, config: Config, data: MixedData, open_source: Callable[[DataConfig], Data]
) -> RunData:
    """Compare the open sources of a mixture with the sources at a checkpoint, by content.

    Args:
        record: the data at the checkpoint.
        config: as in `open_run_data`.
        data: the mixture.
        open_source: function that opens a single source.
    """
    paths = {stream: path for path, stream in config.data.stream_names.items()}
    parts = {paths[stream]: part for stream, part in zip(data.train.streams, data.parts, strict=True)}

    # A source at its path of the checkpoint must have the same content.
    recorded = record.by_path
    if recorded is None:
        recorded = sources_of_0_1_0(record, data, parts, open_source)
    if recorded is None:
        return RunData(config, data, record.message(data.source))
    for path, part in parts.items():
        change = record.change_of_source(recorded.get(path, part.fingerprint), part)
        if change:
            return RunData(config, data, change)

    # A source with a new path has moved if its content equals the content of a missing source; otherwise, the source is new.
    moved = moved_sources(recorded, parts)
    config = replace(config, data=_with_moved(config.data, moved, record.info.tokens))
    if not config.data.mix:
        return RunData(config, parts[config.data.path], "")

    # Record the fingerprints of all sources again, including the sources of mixtures that have ended, which are not open.
    fingerprints = []
    for source in config.data.sources:
        is_open = source.path in parts
        fingerprints.append(parts[source.path].fingerprint if is_open else recorded[source.path])
    mixture = replace(mixed(config.data, parts), all_fingerprints=tuple(fingerprints))
    return RunData(config, mixture, "")


def sources_of_0_1_0(
    record: DataRecord, data: MixedData, parts: Mapping[str, Data], open_source: Callable[[DataConfig], Data]
) -> dict[str, str] | None:
    """Return `DataRecord.by_path` for a mixture of version 0.1.0, which recorded one fingerprint of all sources.

    Args:
        record, data, open_source: as in `compare_mixture`.
        parts: the open sources of the mixture, keyed by path.

    Returns:
        Fingerprints of the sources at the checkpoint, keyed by path; None: some sources have changed.
    """
    old = record.settings.sources

    # If the open sources are the recorded sources in the same order, their order identifies them, even if all have moved.
    current = [part.fingerprint for part in data.val_parts]
    if len(current) == len(old) and joint_fingerprint(current) == record.fingerprint:
        return {source.path: fingerprint for source, fingerprint in zip(old, current, strict=True)}

    # Otherwise the sources are at their old paths.
    found = {}
    for source in old:
        part = parts[source.path] if source.path in parts else open_source(source)
        found[source.path] = part.fingerprint
    if joint_fingerprint(list(found.values())) != record.fingerprint:
        return None
    return found


def moved_sources(recorded: Mapping[str, str], parts: Mapping[str, Data]) -> dict[str, str]:
    """Map the old paths of moved sources to their new paths: the content of both is equal, and the old path is not in use.

    Args:
        recorded: fingerprints of the sources at the checkpoint, keyed by path.
        parts: the open sources, keyed by path.
    """
    moved: dict[str, str] = {}
    for path, part in parts.items():
        if path in recorded:
            continue
        for old, fingerprint in recorded.items():
            if fingerprint == part.fingerprint and old not in parts and old not in moved:
                moved[old] = path
                break
    return moved


def _with_moved(data: DataConfig, moved: Mapping[str, str], tokens: int) -> DataConfig:
    """Replace the paths of moved sources in the settings; `tokens`: number of training tokens up to the checkpoint.

    A mixture that begins at the checkpoint and then equals the previous mixture is dropped.
    """
    data = replace(data, path=moved.get(data.path, data.path), mix=with_paths(data.mix, moved))
    phases = data.phases
    begins_here = len(phases) > 1 and phases[-1].tokens == tokens
    if begins_here and same_shares(data.weights(phases[-2]), data.weights(phases[-1])):
        phases.pop()
    return data.with_phases(phases)
