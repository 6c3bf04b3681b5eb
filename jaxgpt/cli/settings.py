"""Config of a command: the config of a preset, run or file, with the settings of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxgpt.config import Config
from jaxgpt.config_json import from_json
from jaxgpt.data_settings import NAMED_TOKENIZERS
from jaxgpt.errors import UserError
from jaxgpt.files import read_bytes
from jaxgpt.mix import path_of, with_paths
from jaxgpt.presets import DEFAULT, PRESETS, preset
from jaxgpt.suggestions import did_you_mean


def named_config(target: str) -> Config:
    """Return the config of a preset, run or JSON file; an empty `target` means the default preset.

    Raises:
        UserError: if `target` is not a preset, a run or a valid file.
    """
    path = Path(target)
    if target in ("", *PRESETS):
        return preset(target or DEFAULT)
    if path.is_file():
        config = from_json(read_bytes(path), target)
        # The preset's name becomes a directory name, so an unknown name from a file is not used.
        return replace(config, preset=config.preset if config.preset in PRESETS else "custom")
    from jaxgpt.checkpoint.paths import runs_near
    from jaxgpt.checkpoint.run import open_run

    if not path.exists():
        near = did_you_mean(target, PRESETS) or runs_near(path)
        raise UserError(f"no preset, run or file {target!r}{near}; jaxgpt presets lists the presets")
    return open_run(path).config()


def given_model(target: str) -> str:
    """Return the name of the subclass of GPT that a run was trained with; "" for GPT itself, and for other targets."""
    if target in ("", *PRESETS) or not Path(target).is_dir():
        return ""
    from jaxgpt.checkpoint.index import model_of
    from jaxgpt.checkpoint.run import Run

    return model_of(Run(target).checkpoints)


def with_settings(base: Config, settings: Mapping[str, Any]) -> Config:
    """Override a config with the settings of a command line, and resolve `lora.targets`.

    Raises:
        UserError: if a setting is invalid, or settings conflict.
    """
    config = base.with_settings(_relocated(base, settings))
    if config.lora.rank:
        from jaxgpt.convert.peft.lora_targets import resolve_targets

        config = replace(config, lora=replace(config.lora, targets=resolve_targets(config.model, config.lora)))
    return config


def _relocated(base: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert paths of data and tokenizers of a command line from the current directory to the directory of `base`."""
    settings = dict(settings)
    directory = Path(base.directory).resolve()
    if not base.directory or directory == Path.cwd():
        return settings
    if settings.get("data.path"):
        settings["data.path"] = _relative(settings["data.path"], directory)
    if "data.tokenizer" in settings:
        tokenizer = settings["data.tokenizer"]
        if tokenizer not in NAMED_TOKENIZERS and not Path(tokenizer).is_absolute():
            settings["data.tokenizer"] = _relative(tokenizer, directory)
    if "data.mix" in settings:
        paths = [path_of(word) for word in settings["data.mix"]]
        relocated = {path: _relative(path, directory) for path in paths if path}
        settings["data.mix"] = with_paths(settings["data.mix"], relocated)
    return settings


def _relative(path: str, directory: Path) -> str:
    """Express a path relative to a directory, or absolutely if it is outside of the directory."""
    target = Path(path).resolve()
    return str(target.relative_to(directory) if target.is_relative_to(directory) else target)


def origin(config: Config) -> str:
    """Describe the initial weights of a run."""
    if config.state_from:
        return f"the weights and the optimizer state of {config.state_from}"
    return f"the weights of {config.init_from}" if config.init_from else "random weights"


def with_vocab(config: Config) -> Config:
    """Set the vocabulary size of a config to the size of its tokenizer's vocabulary, unless the size is set."""
    from jaxgpt.data.run_tokenizer import vocab_size

    return config.with_model(vocab_size=vocab_size(config))
