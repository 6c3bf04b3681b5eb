"""Changed settings: the difference between two configs."""

from __future__ import annotations

from typing import Any

from jaxgpt.config import Config, flat


def changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return a dict of the old and new values of changed settings, keyed by dotted name.

    If the last mixture of `data.mix` differs, the values are the last mixtures, not the schedules.
    """
    before = flat(old)
    after = flat(new)

    # A run that changes its mixture keeps the earlier mixtures in `data.mix`: compare only the last mixtures.
    was = old.data.phases[-1].words
    now = new.data.phases[-1].words
    if was != now:
        before["data.mix"] = was
        after["data.mix"] = now
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}
