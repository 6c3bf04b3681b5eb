"""Config of a command: the config of a preset, run or file, with the settings of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxgpt.config import Config, changes, from_json
from jaxgpt.errors import UserError, did_you_mean
from jaxgpt.files import read_bytes
from jaxgpt.presets import DEFAULT, PRESETS, preset


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
    from jaxgpt.checkpoint.run import open_run, runs_near

    if not path.exists():
        near = did_you_mean(target, PRESETS) or runs_near(path)
        raise UserError(f"no preset, run or file {target!r}{near}; jaxgpt presets lists the presets")
    return open_run(path).config()


def with_settings(base: Config, settings: Mapping[str, Any]) -> Config:
    """Override a config with the settings of a command line, and resolve `lora.targets`.

    Raises:
        UserError: if a setting is invalid, or settings conflict.
    """
    config = base.with_settings(settings)
    if config.lora.rank:
        from jaxgpt.convert.peft import resolve_targets

        config = replace(config, lora=replace(config.lora, targets=resolve_targets(config.model, config.lora)))
    return config


def with_weights(base: Config, init_from: str, settings: Mapping[str, Any], keep: bool) -> Config:
    """Return a config that starts from the weights of `init_from`, with their model and tokenizer.

    With `keep`, dropout and, unless positions are learned, the context length come from `base`.

    Raises:
        UserError: if `init_from` does not exist, or a setting is invalid or changes the tokenizer or any other model setting.
    """
    from jaxgpt.checkpoint.run import open_run, parse_checkpoint
    from jaxgpt.checkpoint.store import weights_at

    directory, _ = parse_checkpoint(init_from)
    model = open_run(directory).config().model
    free = ["dropout"] if model.positions == "learned" else ["dropout", "block_size"]  # overridable model settings
    own = {name: getattr(base.model, name) for name in free} if keep else {}
    # Absolute paths stay valid if the run is used from a different directory.
    data = replace(base.data, tokenizer=str((directory / "tokenizer.json").absolute()))
    weights = replace(base, model=replace(model, **own), data=data, init_from=str(weights_at(init_from).absolute()))
    config = with_settings(weights, settings)
    for name, (was, now) in changes(weights, config).items():
        section, _, last = name.rpartition(".")
        if (section == "model" and last not in free) or name == "data.tokenizer":
            window = "; to train on shorter windows, use --data.window" if name == "model.block_size" else ""
            raise UserError(f"{name} must be {was!r}, as in the run of --init-from, not {now!r}: omit it{window}")
    return config


def with_vocab(config: Config) -> Config:
    """Set the vocabulary size of a config from its data, unless the size is set."""
    from jaxgpt.data.open import vocab_size

    return config.with_model(vocab_size=vocab_size(config))


def differing(file: Config, run: Config, settings: Mapping[str, Any]) -> str:
    """Return the names of the settings in `file` that a resumed `run` ignores, or ""."""
    set_by_run = {"model.vocab_size", "init_from", "data.tokenizer", *settings}
    set_by_run |= {"train.steps", "train.epochs"} if file.train.epochs else set()
    return ", ".join(name for name in changes(file, run) if name not in set_by_run)
