"""The frozen reference of a run, or its teacher: checked when the run starts, and found again later."""

from __future__ import annotations

from dataclasses import replace

from jaxgpt.checkpoint.index import weights_at
from jaxgpt.checkpoint.needed import recorded_checkpoint
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run, open_run
from jaxgpt.checkpoint.source import open_source
from jaxgpt.config import Config, ModelConfig
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.trainer.frozen_sources import FrozenWeights

# Settings of the model that do not change its logits, or change only the maximum number of positions.
WITHOUT_EFFECT = ("dropout", "init", "init_std", "block_size")


def with_reference(config: Config, tokenizer: Tokenizer) -> Config:
    """Check the settings of a new run, and resolve `post.reference` to an absolute RUN/checkpoints/STEP.

    Args:
        config: settings of the run.
        tokenizer: tokenizer of the initial weights.

    Raises:
        UserError: if the reference is missing, has a different vocabulary or tokenizer than the initial weights, or does not
            fit the model of the run (`check_reference`).
    """
    path = config.post.reference
    if not path:
        return config
    place, _ = parse_checkpoint(path)
    run = open_run(place)
    model = run.config().model
    size = config.model.vocab_size
    if model.vocab_size != size:
        raise UserError(
            f"post.reference {path} has a vocabulary of {model.vocab_size:,}, but the weights of --init-from have {size:,}: "
            f"choose a reference with the same tokenizer"
        )
    if run.tokenizer().to_json() != tokenizer.to_json():
        raise UserError(
            f"post.reference {path} has a different tokenizer than the weights of --init-from, so its ids have different "
            f"meanings: choose a reference with the same tokenizer"
        )
    check_reference(config, model)
    reference = str(weights_at(path).absolute())
    return replace(config, post=replace(config.post, reference=reference))


def check_reference(config: Config, model: ModelConfig) -> None:
    """Raise `UserError` if a reference has a different architecture, or the context of a teacher is too short."""
    if config.post.is_distillation:
        if config.window > model.block_size:
            raise UserError(
                f"{config.window_setting} exceeds the context of the teacher, {model.block_size} tokens: lower --data.window"
            )
        return
    name = different_setting(model, config.model)
    if name:
        raise UserError(
            f"post.reference {config.post.reference} has model.{name} {getattr(model, name)!r}, but the trained model has "
            f"{getattr(config.model, name)!r}: choose a reference with the same model settings"
        )


def different_setting(a: ModelConfig, b: ModelConfig) -> str:
    """Return the name of a setting with an effect on logits that differs between two models, or ""."""
    free = WITHOUT_EFFECT if a.positions != "learned" else [name for name in WITHOUT_EFFECT if name != "block_size"]
    for name in vars(a):
        if name not in free and getattr(a, name) != getattr(b, name):
            return name
    return ""


def reference_path(config: Config, run: Run | None = None) -> str:
    """Return the path of the reference that the trainer reads, RUN/checkpoints/STEP, or "".

    With adapters, the trainer freezes their base, which is also the reference, except in distillation.

    Args:
        config: settings of the run.
        run: the run, if it exists: a reference that has moved is also found next to it.

    Raises:
        UserError: if the reference of the run is missing.
    """
    is_base = bool(config.lora.rank) and not config.post.is_distillation
    if is_base or not config.post.has_reference:
        return ""
    path = config.post.reference or config.init_from
    if run is None:
        return path
    found = recorded_checkpoint(run, path)
    if found is None:
        raise UserError(
            f"{run.path} needs its reference {path}, which is missing: restore it, or move it next to {run.path}"
        )
    return str(found)


def reference_part(config: Config) -> str:
    """Return the part of the checkpoint at `reference_path` that is the reference, as for `open_source`.

    Training with the optimizer state of a run (`state_from`) starts from its parameters, not from their EMA. Without
    `post.reference`, the reference is equal to the initial weights.
    """
    return "params" if config.state_from and not config.post.reference else ""


def open_reference(config: Config, run: Run) -> FrozenWeights | None:
    """Open the reference of an existing run, to evaluate its merged weights; None: the objective has no reference.

    Reading the result raises `UserError` if its weights differ from the reference in training.

    Args:
        config: settings of the evaluation.
        run: the run that was trained with the reference.
    """
    path = reference_path(config, run)
    if not path:
        return None
    is_next_to_base = bool(run.config().lora.rank) and config.post.is_distillation
    source = open_source(*parse_checkpoint(path), reference_part(config))
    return FrozenWeights(source, run, "frozen" if is_next_to_base else "base")
