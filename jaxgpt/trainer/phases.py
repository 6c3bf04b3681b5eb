"""Mixtures of a resumed run: append a new mixture to the schedule, and recognize sources by their content.

The schedule in `data.mix` makes a batch a function of (seed, step): the position in each source follows from it. Within a
schedule, a path identifies a source. Data that have moved keep their identity, because checkpoints record the fingerprint of
each source: the new path replaces the old one in the whole schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.store import Info
from jaxgpt.config import Config, DataConfig
from jaxgpt.data import Data, Mixture
from jaxgpt.data.open import joint_fingerprint, mixed
from jaxgpt.errors import UserError
from jaxgpt.mix import Phase, has_starts, join_phases, same_shares, with_paths

Open = Callable[[DataConfig], Data]


def continued(config: Config, last: Info | None) -> Config:
    """Return the settings of a resumed run: a new `data.mix` begins at the checkpoint, after the earlier mixtures.

    A `data.mix` with `@TOKENS` replaces the whole schedule, and may differ from it only after the checkpoint.

    Raises:
        UserError: if the mixtures before the checkpoint differ.
    """
    new = config.data
    if last is None or not last.tokens or not new.mix:
        return config
    old = last.config().data
    past = [phase for phase in old.phases if not phase.tokens or phase.tokens < last.tokens]
    data = replace(new, dataset=old.dataset, path=old.path, mix=old.mix)

    if not has_starts(new.mix):
        is_same = same_shares(old.weights(past[-1]), new.weights(new.phases[0]))
        phases = past if is_same else [*past, Phase(last.tokens, new.mix)]
        return replace(config, data=data.with_phases(phases))

    if [phase for phase in new.phases if not phase.tokens or phase.tokens < last.tokens] != past:
        fixed = " ".join(join_phases(past)) or old.path or old.dataset
        raise UserError(
            f"data.mix must keep the mixtures up to step {last.step} ({last.tokens:,} tokens): {fixed}; to change the mixture "
            f"at this step, pass one mixture, without @"
        )
    return replace(config, data=data.with_phases(new.phases))


def recognized(config: Config, data: Data, run: Run | None, last: Info | None, opened: Open) -> tuple[Config, Data]:
    """Compare the sources of a resumed run with those of its checkpoint, by content.

    Args:
        config: settings, after `continued`.
        data: data of the mixtures that have not ended.
        run: the run; None: a new run.
        last: the checkpoint; None: train from step 0.
        opened: function that opens the data of a single source.

    Returns:
        The settings with the new paths of sources that have moved, and the data for these settings.

    Raises:
        UserError: if the content of a source has changed.
    """
    if run is None or last is None or not config.data.mix or not data.parts:
        return config, data
    parts = _by_path(config.data, data)
    known = known_fingerprints(run, last, data, parts, opened)
    for path, part in parts.items():
        if known.get(path, part.fingerprint) != part.fingerprint:
            raise changed_data(run, last, part.source)

    moved = moved_sources(known, {path: part.fingerprint for path, part in parts.items()})
    config = replace(config, data=_renamed(config.data, moved, last.tokens))
    if not config.data.mix:
        return config, parts[config.data.path]
    data = mixed(config.data, parts)
    fingerprints = {moved.get(path, path): fingerprint for path, fingerprint in known.items()}
    fingerprints |= {path: part.fingerprint for path, part in parts.items()}
    return config, replace(data, fingerprints=tuple(fingerprints[each.path] for each in config.data.sources))


def known_fingerprints(run: Run, last: Info, data: Data, parts: Mapping[str, Data], opened: Open) -> dict[str, str]:
    """Return the fingerprint of each source of a checkpoint, keyed by its path in the checkpoint."""
    old = last.config().data
    paths = [each.path for each in old.sources]
    if "sources" in last.about:
        return dict(zip(paths, last.about["sources"], strict=True))
    joint = last.about.get("data", "")
    if not old.mix:
        return {old.path: joint}

    # Version 0.1.0 recorded one fingerprint of all sources. If all have moved, their order identifies them.
    current = [part.fingerprint for part in data.val_parts]
    if len(current) == len(paths) and joint_fingerprint(current) == joint:
        return dict(zip(paths, current, strict=True))
    found = {}
    for source in old.sources:
        part = parts[source.path] if source.path in parts else opened(source)
        found[source.path] = part.fingerprint
    if joint_fingerprint(list(found.values())) != joint:
        raise changed_data(run, last, data.source)
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


def changed_sources(data: DataConfig, last: Info) -> str:
    """Describe the sources that a new mixture adds and removes at a checkpoint, or return ""."""
    phases = data.phases
    if phases[-1].tokens != last.tokens or len(phases) == 1:
        return ""
    now = data.weights(phases[-1])
    before = data.weights(phases[-2])
    earlier = {path for phase in phases[:-1] for path in data.weights(phase)}
    kinds = {
        "new": [path for path in now if path not in earlier],
        "used again": [path for path in now if path in earlier and path not in before],
        "no longer used": [path or data.dataset for path in before if path not in now],
    }
    changes = [f"{kind} {', '.join(paths)}" for kind, paths in kinds.items() if paths]
    return f"sources of the new mixture: {'; '.join(changes)}" if changes else ""


def changed_data(run: Run, last: Info, source: str) -> UserError:
    """Return the error for data with a different content than in the checkpoint."""
    return UserError(
        f"the data of {run.path} has changed since step {last.step}: {source}; restore it, add the new data as a source of "
        f"--data.mix, or start a new run: {new_run_command(run)} (with --keep-optimizer: from its optimizer state)"
    )


def new_run_command(run: Run) -> str:
    """Return the command that trains the weights of a run on different data, in a new run."""
    return f"jaxgpt train finetune --init-from {run.path} --data.path PATH"


def _by_path(config: DataConfig, data: Data) -> dict[str, Data]:
    """Key the open sources of a mixture by path."""
    assert isinstance(data.train, Mixture)
    paths = {stream: path for path, stream in config.streams.items()}
    return {paths[stream]: part for stream, part in zip(data.train.streams, data.parts, strict=True)}


def _renamed(data: DataConfig, moved: Mapping[str, str], tokens: int) -> DataConfig:
    """Replace the paths of sources, and drop a mixture that begins at `tokens` but then equals the previous mixture."""
    data = replace(data, path=moved.get(data.path, data.path), mix=with_paths(data.mix, moved))
    phases = data.phases
    begins_here = len(phases) > 1 and phases[-1].tokens == tokens
    if begins_here and same_shares(data.weights(phases[-2]), data.weights(phases[-1])):
        phases.pop()
    return data.with_phases(phases)
