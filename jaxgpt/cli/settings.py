"""Config of a command: a preset or a run, and the settings of the command line over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxgpt.cli.output import note
from jaxgpt.config import Config, from_json
from jaxgpt.errors import UserError, did_you_mean
from jaxgpt.files import beside, read_bytes
from jaxgpt.presets import DEFAULT, PRESETS, preset


def named_config(target: str) -> Config:
    """Return the config of a preset or run; empty: of the default preset.

    The name of a preset means the preset. A note is printed if there is such a path.

    Raises:
        UserError: if there is no such preset or run.
    """
    if target in ("", *PRESETS):
        if target and Path(target).exists():
            note(f"{target} is the preset: for the file or directory of this name, write ./{target}")
        return preset(target or DEFAULT)
    if not Path(target).exists():
        near = did_you_mean(target, [*PRESETS, *beside(target)])
        raise UserError(f"no preset or run {target!r}{near}; jaxgpt presets lists the presets")
    from jaxgpt.checkpoint.run import open_run

    return open_run(Path(target)).config()


def config_file(name: str) -> Config:
    """Read settings from a file."""
    path = Path(name)
    if path.is_dir():
        raise UserError(f"--config {name} is a directory; to repeat a run: jaxgpt train {name} --out NEW")
    config = from_json(read_bytes(path), name)
    # The name of the preset becomes the name of a directory, and a file may hold any string.
    return replace(config, preset=config.preset if config.preset in PRESETS else "custom")


def with_settings(base: Config, settings: Mapping[str, Any]) -> Config:
    """Lay the settings of a command line over a config, and name the matrices that LoRA adapts.

    Raises:
        UserError: if a setting is empty or invalid, or the settings do not fit.
    """
    for name, example in (("data.path", "my.txt"), ("data.mix", "web=0.7 code=0.3")):
        if name in settings and not settings[name]:
            raise UserError(f"--{name} is empty: give it a value, such as --{name} {example}, or leave it out")
    config = base.with_settings(settings)
    if not config.lora.rank:
        return config
    from jaxgpt.convert.peft import resolve_targets

    return replace(config, lora=replace(config.lora, targets=resolve_targets(config.model, config.lora)))
