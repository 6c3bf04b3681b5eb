"""A note about the sampling settings that a model recommends, for the commands that sample."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from jaxgpt.cli.console import note

if TYPE_CHECKING:
    from jaxgpt.lm import LM


def note_sampling(lm: LM, given: Collection[str], unused: Collection[str] = ()) -> None:
    """Print the model's recommended settings that change a default or are ignored, except settings in `given` and `unused`."""
    from jaxgpt.lm.defaults import sampling_defaults

    line = sampling_defaults(lm.tokenizer).note({*given, *unused})
    if line:
        note(line)
