"""The settings that a preset or file sets, and the settings that a run inherits from the run of its initial weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxgpt.cli.weights_settings import OF_POSITIONS
from jaxgpt.config import OF_CHATS, Config
from jaxgpt.files import read_bytes
from jaxgpt.presets import PRESETS
from jaxgpt.strict_json import parse_json


def unset_of_chats(target: str) -> list[str]:
    """Return the names of the settings in `OF_CHATS` that a preset or file does not set; a run sets all of them."""
    if target in ("", *PRESETS):
        return [*OF_CHATS]
    if not Path(target).is_file():
        return []
    return [name for name in OF_CHATS if name not in _section(target, "data")]


def positions_in(target: str) -> tuple[str, ...]:
    """Return the names of the settings in `OF_POSITIONS` that a file sets."""
    if target in ("", *PRESETS) or not Path(target).is_file():
        return ()
    model = _section(target, "model")
    return tuple(name for name in OF_POSITIONS if name in model)


def inherited_note(config: Config, inherited: Collection[str], init_from: str) -> str:
    """Describe the settings of `data` that a config inherits from the run of its initial weights; "": no settings."""
    used = list[str]()
    for name in inherited:
        value = getattr(config.data, name)
        if value:
            used.append(f"data.{name} {value if isinstance(value, str) else ' '.join(value)}")
    return f"using {' and '.join(used)}, as {init_from}" if used else ""


def _section(file: str, name: str) -> Mapping[str, Any]:
    """Return a section of a valid JSON file of settings."""
    section: Mapping[str, Any] = parse_json(read_bytes(Path(file)), file).get(name, {})
    return section
