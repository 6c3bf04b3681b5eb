"""Changed settings: the difference between two configs."""

from __future__ import annotations

from typing import Any

from jaxgpt.config import Config, flat


def changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return a dict of the old and new values of changed settings, keyed by dotted name.

    If the last mixtures of `data.mix` differ, the values of `data.mix` are only these mixtures. If the schedules differ only in
    earlier mixtures or in starts, the values are the schedules.
    """
    before = flat(old)
    after = flat(new)

    # A run that changes its mixture keeps the earlier mixtures in `data.mix`, so omit them from the change:
    # web=1 -> web=1 @1000 web=0.5 code=0.5 becomes web=1 -> web=0.5 code=0.5.
    old_mixture = old.data.phases[-1].words
    new_mixture = new.data.phases[-1].words
    if old_mixture != new_mixture:
        before["data.mix"] = old_mixture
        after["data.mix"] = new_mixture
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}
