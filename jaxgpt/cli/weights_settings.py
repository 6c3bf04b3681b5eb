"""Settings of a run that starts from the weights of another run, or from its train state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.settings import with_settings
from jaxgpt.config import Config, ModelConfig, flat
from jaxgpt.config_changes import changes
from jaxgpt.errors import UserError

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run

# Settings of the model that a run may change with --init-from; learned positions determine `block_size`.
SIZES = ("dropout", "block_size")
# Settings of positions and windows that the weights do not determine. By default, they come from the run of the weights.
OF_POSITIONS = (
    "sliding_window",
    "rope_theta",
    "rope_local_theta",
    "rope_factor",
    "rope_scaling",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_beta_slow",
    "rope_beta_fast",
    "rope_attention_factor",
    "rope_original_context",
)
# Settings that determine the arrays of the train state and their meaning.
OF_STATE = ("optim.name", "optim.momentum_dtype", "lora.rank", "lora.alpha", "lora.targets")


def with_weights(
    base: Config,
    init_from: str,
    settings: Mapping[str, Any],
    keep: Collection[str] = (),
    keep_optimizer: bool = False,
    inherited: Collection[str] = (),
) -> Config:
    """Return a config that starts from the weights of `init_from`, with their model and tokenizer.

    Args:
        base: config with all other settings.
        init_from: run, or RUN/checkpoints/STEP.
        settings: settings on the command line, keyed by dotted name.
        keep: names in `SIZES` and `OF_POSITIONS`: these settings come from `base` if the weights do not determine them.
        keep_optimizer: also start from the optimizer state, by default of the last checkpoint instead of the best.
        inherited: names of settings of `data` that come from the run of the weights.

    Raises:
        UserError: if `init_from` does not exist; if a setting is invalid, or changes the tokenizer, a model setting that the
            weights determine or, with adapters, the positions; or if `keep_optimizer` is set, and the optimizer state or the
            base of its adapters is missing, or the state does not match the settings.
    """
    from jaxgpt.checkpoint.index import weights_at
    from jaxgpt.checkpoint.paths import parse_checkpoint
    from jaxgpt.checkpoint.run import open_run

    directory, _ = parse_checkpoint(init_from)
    run = open_run(directory)
    source = run.config()
    free = _free_settings(source.model)

    # Use the model, tokenizer and data of the weights. Absolute paths stay valid if the run is used from a different directory.
    model = replace(source.model, **{name: getattr(base.model, name) for name in free if name in keep})
    data = replace(base.data, tokenizer=str((directory / "tokenizer.json").absolute()))
    data = replace(data, **{name: getattr(source.data, name) for name in inherited})
    derived = replace(base, model=model, data=data, state_from="")
    if keep_optimizer:
        derived = _with_state(derived, run, init_from)
    else:
        derived = replace(derived, init_from=str(weights_at(init_from).absolute()))

    # Apply the settings of the command line, which the weights restrict.
    config = with_settings(derived, settings)
    _check_model(derived, config, free)
    if config.lora.rank:
        _check_positions(source.model, config.model)
    if keep_optimizer:
        _check_optimizer(source, config, directory)
    if config.post.reference:
        from jaxgpt.post.frozen_reference import with_reference

        config = with_reference(config, run.tokenizer())
    return config


def _free_settings(model: ModelConfig) -> list[str]:
    """Return the names of the model settings that may differ from the run of the weights."""
    free = ["dropout"]
    if model.positions != "learned":
        free.append("block_size")
    if model.positions == "rope":
        free += OF_POSITIONS
    return free


def _check_model(derived: Config, config: Config, free: Collection[str]) -> None:
    """Raise `UserError` if a config changes the tokenizer of the weights, or a model setting outside `free`."""
    for name, (was, now) in changes(derived, config).items():
        section, _, last = name.rpartition(".")
        if (section == "model" and last not in free) or name == "data.tokenizer":
            window = "; to train on shorter windows, use --data.window" if name == "model.block_size" else ""
            raise UserError(f"{name} must be {was!r}, as in the run of --init-from, not {now!r}: omit it{window}")


def _check_positions(base: ModelConfig, model: ModelConfig) -> None:
    """Raise `UserError` if settings of `OF_POSITIONS` differ between the base of new adapters and the adapted model.

    An exported adapter has no such settings: PEFT would compute it with the settings of the base.
    """
    for name in OF_POSITIONS:
        was = getattr(base, name)
        if getattr(model, name) != was:
            raise UserError(
                f"model.{name} must be {was!r} with lora.rank, as in the base of the adapters: omit it, or train all weights "
                f"without --lora.rank"
            )


def _with_state(config: Config, run: Run, init_from: str) -> Config:
    """Return a config that starts from a train state of a run and, if the state has adapters, from the weights of their base.

    Args:
        config: settings of the new run.
        run: run of the train state.
        init_from: the run, for its last checkpoint, or RUN/checkpoints/STEP.

    Raises:
        UserError: if the checkpoint has no optimizer state, or the base of its adapters is missing.
    """
    from jaxgpt.checkpoint.needed import recorded_checkpoint

    state = str(_checkpoint_with_state(run, init_from).absolute())
    source = run.config()
    if not source.lora.rank:
        return replace(config, init_from=state, state_from=state)

    base = recorded_checkpoint(run, source.init_from)
    if base is None:
        raise UserError(f"{run.path} holds adapters of {source.init_from}, which is missing: restore it")
    return replace(config, init_from=str(base.absolute()), state_from=state)


def _checkpoint_with_state(run: Run, init_from: str) -> Path:
    """Return the directory of a checkpoint with an optimizer state; arguments as for `_with_state`."""
    from jaxgpt.checkpoint.index import resolve_step, weights_at
    from jaxgpt.checkpoint.paths import parse_checkpoint

    _, which = parse_checkpoint(init_from)
    if which == "best":  # no step is given
        checkpoint = run.checkpoints / str(resolve_step(run.checkpoints, "last"))
    else:
        checkpoint = weights_at(init_from)
    if not (checkpoint / "opt_state").is_dir():
        raise UserError(f"{checkpoint} has no optimizer state: omit --keep-optimizer")
    return checkpoint


def _check_optimizer(source: Config, config: Config, directory: Path) -> None:
    """Raise `UserError` if the train state of a run, with the settings `source`, does not match the new settings."""
    old = flat(source)
    new = flat(config)
    for name in OF_STATE:
        if old[name] != new[name]:
            option = f"--{name.replace('_', '-')} {old[name]}"
            fix = f"use {option}, or omit --keep-optimizer; jaxgpt train {directory} keeps all its settings"
            raise UserError(f"--keep-optimizer needs {name} {old[name]}, as in {directory}, not {new[name]}: {fix}")
