"""Introduction of a training run: its model, data, objective, devices and directory."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.output import Facts
from jaxgpt.cli.settings import origin
from jaxgpt.config import Config
from jaxgpt.counts import parameter_count
from jaxgpt.data import Batches, Data
from jaxgpt.errors import plural
from jaxgpt.parallel.processes import process_count
from jaxgpt.post.preference import pair_loss
from jaxgpt.trainer.program import Program


def introduction(program: Program, data: Data, run: Run, last: Info) -> Facts:
    """Return the facts to print before the first step of a run.

    Args:
        program: the compiled functions of the run.
        data: data of the run.
        run: directory of the run.
        last: the checkpoint that training resumes from; `Info(0)` for a new run.
    """
    config = program.config
    return {
        "preset": [f"{config.preset or 'none'}, {_size(program)}", _adapters(program)],
        "weights": f"started from {origin(config)}" if config.init_from else "",
        "data": _rollout_lines(config, data) if config.post.is_rollout else data_lines(config, data, last),
        "devices": [_devices(program), program.note],
        "run": str(run.path),
    }


def _size(program: Program) -> str:
    """Return the number of parameters, including frozen parameters."""
    return f"{parameter_count(program.abstract.weights):,} parameters"


def _adapters(program: Program) -> str:
    """Describe the adapters of a run, or return ""."""
    lora = program.config.lora
    if not lora.rank:
        return ""
    trained = parameter_count(program.abstract.state.params)
    return f"LoRA of rank {lora.rank} on {lora.targets}: {trained:,} trainable parameters"


def _devices(program: Program) -> str:
    """Return the number and kind of the devices, the mesh and the number of processes."""
    mesh = program.mesh
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({jax.default_backend()})"
    split = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    if split:
        devices += f": {split}"
    if process_count() > 1:
        devices += f", in {process_count()} processes"
    return devices


def data_lines(config: Config, data: Data, last: Info) -> list[str]:
    """Return lines about the data, the length of the training, the objective and its reference.

    Args:
        config: settings of the run.
        data: data of the run, other than prompts.
        last: the checkpoint that training resumes from; `Info(0)` for a new run.
    """
    train = config.train
    rows_before = last.tokens // config.row_tokens
    steps_left = train.steps - last.step
    epochs = (rows_before + steps_left * train.batch_size) / Batches.of(config, data.train).per_epoch
    has_equal_batches = rows_before == last.step * train.batch_size
    if has_equal_batches:
        length = f"{train.steps:,} steps of {_batch(config)}: {epochs:.3g} epochs"
    else:
        length = f"{steps_left:,} more steps of {_batch(config)}: {epochs:.3g} epochs in total"
    return [data.source, _tokens(data), length, _objective(config), _reference(config, epochs)]


def _tokens(data: Data) -> str:
    """Return the sizes of the data, their splits and the vocabulary."""
    characters = f"{data.characters:,} characters, " if data.characters is not None else ""
    held_out = f"{len(data.val):,} validation tokens" if data.held_out else "no validation tokens"
    vocabulary = f"vocabulary of {data.tokenizer.vocab_size:,}"
    return f"{characters}{len(data.train):,} training tokens, {held_out}, {vocabulary}"


def _batch(config: Config) -> str:
    """Return the size of a batch, as in `8 x 256 tokens`."""
    size = config.train.batch_size
    rows = f"{size:,} pairs x 2" if config.post.is_preference else f"{size:,}"
    return f"{rows} x {config.window:,} tokens"


def _objective(config: Config) -> str:
    """Describe the objective of a run without rollouts; for next-token, return the loss of a uniform distribution."""
    if config.post.is_preference:
        return _preference(config)
    if config.post.is_distillation:
        return _distillation(config)
    V = config.model.vocab_size
    return f"uniform baseline: ln {V:,} = {math.log(V):.2f}"


def _preference(config: Config) -> str:
    """Return the objective on preference pairs, its reference and, if constant, the loss of equal scores."""
    post = config.post
    text = f"objective: {post.objective}, beta {post.beta:g}"
    if post.has_reference and config.lora.rank:
        text += ", reference: the frozen base"
    elif post.has_reference:
        text += f", reference: {post.reference or 'the initial weights'}"
    if post.objective == "orpo" or post.sft:  # the loss also depends on the likelihood of the chosen answer
        return text
    equal = float(pair_loss(jnp.zeros((1, 2)), post)[0])
    return f"{text}; loss without a preference: {equal:.4f}"


def _distillation(config: Config) -> str:
    """Return the objective of a distillation, and its teacher."""
    post = config.post
    beta = f" (beta {post.jsd_beta:g})" if post.divergence == "jsd" else ""
    return f"objective: {post.objective}, {post.divergence} divergence{beta} from {post.reference}"


def _reference(config: Config, epochs: float) -> str:
    """Describe when a run on preference pairs computes its reference; return "" without a reference."""
    post = config.post
    if not (post.is_preference and post.has_reference):
        return ""
    if config.computes_reference_once:
        kept = "" if config.lora.rank else ", so no copy is in memory during training"
        return f"reference: computed once for each pair, before the first step{kept}"
    text = "reference: computed at every step"
    if not config.lora.rank:
        return f"{text}, from a copy of the weights in memory"
    if epochs > 1:
        return f"{text}, {epochs:.3g} times for each pair; --post.reference-log-p once computes it once"
    return text


def _rollout_lines(config: Config, data: Data) -> list[str]:
    """Return lines about the prompts, the rollouts, and the rewards or the teacher."""
    post = config.post
    train = config.train
    answers = f"{config.rollout_answers:,} answers, {post.answers_per_prompt} to each prompt"
    rollout = f"{plural(train.steps_per_call, 'step')} per rollout of {answers}, {plural(post.rollout_epochs, 'epoch')}"
    return [
        data.source,
        f"{train.steps:,} steps of {train.batch_size:,} answers; {rollout}",
        _rewards(config) if post.has_rewards else _distillation(config),
    ]


def _rewards(config: Config) -> str:
    """Return the objective of a run with rewards, its rewards, and the penalty of the KL divergence."""
    post = config.post
    kl = f", kl {post.kl:g} ({post.kl_estimator})" if post.kl else ""
    return f"objective: {post.objective}, reward {' '.join(post.reward)}{kl}"
