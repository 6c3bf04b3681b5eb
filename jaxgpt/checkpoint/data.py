"""Data of a run: open them where they are now, and compare each source with a checkpoint by its content.

Within a schedule of mixtures, a path identifies a source. Data that have moved keep their identity, because checkpoints record
the fingerprint of each source: the new path replaces the old one in the whole schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from jaxgpt.checkpoint.index import resolve_step
from jaxgpt.checkpoint.info import Info, read_info
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config, DataConfig
from jaxgpt.data import Data, Mixture, open_data
from jaxgpt.data.opened import Recorded, joint_fingerprint, mixed
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.mix import same_shares, with_paths
from jaxgpt.progress import NO_PROGRESS, Progress

Open = Callable[[DataConfig], Data]

OTHER_SPLIT = "; other files are for validation now"


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


def about_data(data: Data) -> dict[str, object]:
    """Return the entries of a checkpoint that identify the data of its run."""
    sources = list(data.recorded.fingerprints) or [data.fingerprint]
    parts = data.parts or (data,)
    return {
        "data": data.fingerprint,
        "sources": sources,
        "data_tokens": _tokens(data),
        "boundaries": {part.fingerprint: part.recorded.boundary for part in parts},
        "held_out": data.held_out,
        "files": {part.fingerprint: dict(part.recorded.files) for part in parts},
    }


def info_of(run: Run, checkpoint: str) -> Info:
    """Read the checkpoint.json of a checkpoint: `best`, `last` or a step."""
    step = resolve_step(run.checkpoints, checkpoint)
    return read_info(run.checkpoints / str(step))


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

    def opened(source: DataConfig) -> Data:
        return open_data(replace(config, data=source), tokenizer, progress)

    data = open_data(config, tokenizer, progress, tokens)
    if run is None or info is None or not _is_recorded(info):
        return RunData(config, data, "")
    if data.parts:
        return compared(run, info, config, data, opened)

    # The data is a single source: compare it with the first recorded source. Version 0.1.0 recorded no list of sources.
    recorded, *_ = info.about.get("sources", [info.about["data"]])
    return RunData(config, data, _change(run, info, recorded, data, _sizes(info, data)))


def compare_given(run: Run | None, info: Info | None, config: Config, data: Data) -> RunData:
    """Compare data that the caller has opened, as a whole, with the data at a checkpoint.

    Args:
        run, info, config: as in `open_run_data`.
        data: the opened data.
    """
    if run is None or info is None or not _is_recorded(info):
        return RunData(config, data, "")
    return RunData(config, data, _change(run, info, info.about["data"], data, _sizes(info, data)))


def compared(run: Run, info: Info, config: Config, data: Data, opened: Open) -> RunData:
    """Compare the open sources of a mixture with a checkpoint's sources, by content; `opened` opens a single source."""
    parts = _by_path(config.data, data)
    known = known_fingerprints(info, data, parts, opened)
    if known is None:
        return RunData(config, data, _describe(run, info, data.source))
    for path, part in parts.items():
        recorded = known.get(path, part.fingerprint)
        change = _change(run, info, recorded, part)
        if change:
            return RunData(config, data, change)

    current = {path: part.fingerprint for path, part in parts.items()}
    moved = moved_sources(known, current)
    config = replace(config, data=_renamed(config.data, moved, info.tokens))
    if not config.data.mix:
        return RunData(config, parts[config.data.path], "")

    # The sources of mixtures that have ended are not open: their fingerprints come from the checkpoint.
    fingerprints = {moved.get(path, path): fingerprint for path, fingerprint in known.items()}
    fingerprints |= current
    of_sources = tuple(fingerprints[each.path] for each in config.data.sources)
    mixture = replace(mixed(config.data, parts), recorded=Recorded(fingerprints=of_sources))
    return RunData(config, mixture, "")


def known_fingerprints(info: Info, data: Data, parts: Mapping[str, Data], opened: Open) -> dict[str, str] | None:
    """Return the fingerprint of each source of a checkpoint, keyed by its path in the checkpoint; None: some have changed."""
    old = info.config().data
    paths = [each.path for each in old.sources]
    if "sources" in info.about:
        return dict(zip(paths, info.about["sources"], strict=True))
    joint = info.about["data"]
    if not old.mix:
        return {old.path: joint}

    # Version 0.1.0 recorded one fingerprint of all sources. If all have moved, their order identifies them.
    current = [part.fingerprint for part in data.val_parts]
    if len(current) == len(paths) and joint_fingerprint(current) == joint:
        return dict(zip(paths, current, strict=True))

    # Otherwise the sources are at their old paths.
    found = {}
    for source in old.sources:
        part = parts[source.path] if source.path in parts else opened(source)
        found[source.path] = part.fingerprint
    if joint_fingerprint(list(found.values())) != joint:
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
        matches = [old for old, its in gone.items() if its == fingerprint and old not in moved]
        if matches:
            moved[matches[0]] = path
    return moved


def _is_recorded(info: Info) -> bool:
    """Return whether a checkpoint records its data; false for weights that were saved without a training run."""
    return "data" in info.about


def _change(run: Run, info: Info, recorded: str, source: Data, sizes: str = "") -> str:
    """Return how a source has changed since a checkpoint, or "".

    Args:
        run: the run of the checkpoint.
        info: contents of the checkpoint.json.
        recorded: fingerprint of the source at the checkpoint.
        source: the present source.
        sizes: numbers of tokens then and now, from `_sizes`; "": equal, or not recorded.
    """
    if recorded != source.fingerprint:
        files = _file_changes(info, recorded, source)
        return _describe(run, info, source.source + sizes + files)
    if _has_other_split(info, source):
        return _describe(run, info, source.source + OTHER_SPLIT)
    return ""


def _describe(run: Run, info: Info, source: str) -> str:
    return f"the data of {run.path} has changed since step {info.step}: {source}"


def _by_path(config: DataConfig, data: Data) -> dict[str, Data]:
    """Key the open sources of a mixture by path."""
    assert isinstance(data.train, Mixture)
    paths = {stream: path for path, stream in config.stream_names.items()}
    return {paths[stream]: part for stream, part in zip(data.train.streams, data.parts, strict=True)}


def _renamed(data: DataConfig, moved: Mapping[str, str], tokens: int) -> DataConfig:
    """Replace the paths of sources, and drop a mixture that begins at `tokens` but then equals the previous mixture."""
    data = replace(data, path=moved.get(data.path, data.path), mix=with_paths(data.mix, moved))
    phases = data.phases
    begins_here = len(phases) > 1 and phases[-1].tokens == tokens
    if begins_here and same_shares(data.weights(phases[-2]), data.weights(phases[-1])):
        phases.pop()
    return data.with_phases(phases)


def _has_other_split(info: Info, data: Data) -> bool:
    """Return whether renamed files have changed the split of a source; the content of all files together is unchanged.

    Checkpoints of 0.1.0 have no boundaries.
    """
    boundaries: dict[str, int | None] = info.about.get("boundaries", {})
    boundary = data.recorded.boundary
    return boundaries.get(data.fingerprint, boundary) != boundary


def _sizes(info: Info, data: Data) -> str:
    """Return the numbers of tokens at a checkpoint and now if they differ and were recorded, otherwise ""."""
    was = info.about.get("data_tokens")
    now = _tokens(data)
    if not isinstance(was, int) or was == now:
        return ""
    return f" ({was:,} tokens then, {now:,} now)"


def _file_changes(info: Info, recorded: str, data: Data) -> str:
    """Return the files of a directory that were added, removed or changed since a checkpoint, or "" if not recorded.

    Args:
        info: contents of the checkpoint.json.
        recorded: fingerprint of the directory at the checkpoint.
        data: the directory now.
    """
    old: dict[str, str] = info.about.get("files", {}).get(recorded, {})
    new = data.recorded.files
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


def _tokens(data: Data) -> int:
    """Return the number of tokens; a validation split that is not held out is a part of the training split."""
    tokens = len(data.train)
    if data.held_out:
        tokens += len(data.val)
    return tokens
