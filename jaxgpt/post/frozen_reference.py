"""The frozen reference of a run, or its teacher: checked for a new run, and opened for training and evaluation."""

from __future__ import annotations

from dataclasses import replace

from jaxgpt.checkpoint.index import weights_at
from jaxgpt.checkpoint.needed import recorded_checkpoint
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run, open_run
from jaxgpt.checkpoint.source import WeightSource, open_base, open_source
from jaxgpt.config import Config, ModelConfig
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.trainer.frozen_sources import FrozenWeights, open_same_model

WITHOUT_EFFECT = ("dropout", "init", "init_std")  # settings of the model that do not change its logits


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
    without_effect = set(WITHOUT_EFFECT)
    if a.positions != "learned":
        without_effect.add("block_size")  # without learned positions, only a limit on the length
    for name in vars(a):
        if name not in without_effect and getattr(a, name) != getattr(b, name):
            return name
    return ""


def open_reference(config: Config, run: Run | None) -> WeightSource | None:
    """Open the frozen weights that the objective of a run reads, without reading them onto devices.

    Args:
        config: settings of the run.
        run: the run, if it exists: weights that have moved are also found next to it.

    Returns:
        The teacher in distillation; otherwise the weights at `post.reference` or, if it is empty, the initial weights. None if
        the objective reads no such weights, or the reference is the base of adapters, which the trainer opens anyway.

    Raises:
        UserError: if the weights are missing or damaged, or a reference has a different architecture than the trained model.
    """
    post = config.post
    if post.is_distillation:
        return open_source(*parse_checkpoint(_found(post.reference, run)))
    if config.lora.rank or not post.has_reference:
        return None
    if post.reference:
        return open_same_model(_found(post.reference, run), config)

    # With the optimizer state of a run, training starts from the parameters of its checkpoint, not from their EMA.
    part = "params" if config.state_from else ""
    return open_same_model(_found(config.init_from, run), config, part)


def _found(path: str, run: Run | None) -> str:
    """Return the path of frozen weights; for an existing run, find them at the path or next to the run.

    Raises:
        UserError: if the weights of an existing run are missing.
    """
    if run is None:
        return path
    checkpoint = recorded_checkpoint(run, path)
    if checkpoint is None:
        raise UserError(
            f"{run.path} needs its reference {path}, which is missing: restore it, or move it next to {run.path}"
        )
    return str(checkpoint)


def open_trained_reference(run: Run) -> FrozenWeights | None:
    """Open the frozen weights that the objective of an existing run reads, to evaluate the weights of the run.

    Reading the result raises `UserError` if its weights differ from the weights in training. The result is None if the
    objective reads no weights.
    """
    config = run.config()
    if not config.post.has_reference:
        return None
    source = open_reference(config, run)
    if source is None:
        return FrozenWeights(open_base(run, config), run, part="base")
    return FrozenWeights(source, run, part="frozen" if config.lora.rank else "base")
