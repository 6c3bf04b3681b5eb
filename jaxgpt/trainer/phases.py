"""Mixtures of a resumed run: append a new mixture to the schedule, and describe its sources.

The schedule in `data.mix` makes a batch a function of (seed, step): the position in each source follows from the schedule.
"""

from __future__ import annotations

from dataclasses import replace

from jaxgpt.checkpoint.info import Info
from jaxgpt.config import Config, DataConfig
from jaxgpt.errors import UserError
from jaxgpt.mix import Phase, has_starts, join_phases, same_shares


def with_mixtures(config: Config, last: Info | None) -> Config:
    """Return the settings of a resumed run: a new `data.mix` begins at the checkpoint, after the earlier mixtures.

    A `data.mix` with `@TOKENS` replaces the whole schedule, and must equal the earlier schedule up to the checkpoint.

    Raises:
        UserError: if the mixtures before the checkpoint differ.
    """
    new = config.data
    if last is None or not last.tokens or not new.mix:
        return config
    old = last.config().data
    past = _begun(old, last.tokens)
    data = replace(new, dataset=old.dataset, path=old.path, mix=old.mix)

    # A mixture without @TOKENS begins at the checkpoint, unless it equals the current mixture.
    if not has_starts(new.mix):
        phases = past
        if not same_shares(old.weights(past[-1]), new.weights(new.phases[0])):
            phases = [*past, Phase(last.tokens, new.mix)]
        return replace(config, data=data.with_phases(phases))

    # A schedule must keep the mixtures that the run has trained on.
    if _begun(new, last.tokens) != past:
        fixed = " ".join(join_phases(past)) or old.path or old.dataset
        raise UserError(
            f"data.mix must keep the mixtures up to step {last.step} ({last.tokens:,} tokens): {fixed}; to change the mixture "
            f"at this step, pass one mixture, without @"
        )
    return replace(config, data=data.with_phases(new.phases))


def _begun(data: DataConfig, tokens: int) -> list[Phase]:
    """Return the mixtures of a schedule that begin before `tokens`, including the first even if `tokens` is 0."""
    return [phase for phase in data.phases if not phase.tokens or phase.tokens < tokens]


def changed_sources(data: DataConfig, last: Info) -> str:
    """Describe the sources that a new mixture adds and removes at a checkpoint, or return ""."""
    phases = data.phases
    begins_here = len(phases) > 1 and phases[-1].tokens == last.tokens
    if not begins_here:
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
