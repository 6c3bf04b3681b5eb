"""Introduction of a training run: its model, data, devices and directory."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.settings import origin
from jaxgpt.config import Config
from jaxgpt.counts import parameter_count
from jaxgpt.data import Batches, Data
from jaxgpt.errors import plural
from jaxgpt.parallel.processes import process_count
from jaxgpt.post.preference import pair_loss
from jaxgpt.post.reference import is_once
from jaxgpt.trainer.program import Program


class Introduction(NamedTuple):
    """The facts to print before the first step of a run.

    Attributes:
        program: the compiled functions of the run.
        data: its data.
        run: its directory.
        last: the checkpoint that training resumes from; `Info(0)` for a new run.
    """

    program: Program
    data: Data
    run: Run
    last: Info

    def lines(self) -> dict[str, str | list[str]]:
        """Return the lines about the model, data, devices and directory of the run, keyed by label."""
        config = self.program.config
        model = [f"{config.preset or 'none'}, {parameter_count(self.program.abstract_weights):,} parameters"]
        if config.lora.rank:
            trained = parameter_count(self.program.abstract_state.params)
            model.append(f"LoRA of rank {config.lora.rank} on {config.lora.targets}: {trained:,} trainable parameters")
        return {
            "preset": model,
            "weights": f"started from {origin(config)}" if config.init_from else "",
            "data": self.describe_data(),
            "devices": [self._describe_devices(), self.program.note],
            "run": str(self.run.path),
        }

    def describe_data(self) -> list[str]:
        """Return lines about the data, the length of the training, and the uniform baseline or the objective."""
        config = self.program.config
        data = self.data
        train = config.train
        if config.post.is_rollout:
            return [data.source, *self._describe_rollouts(config)]

        rows = f"{train.batch_size:,} x {config.window:,} tokens"
        if config.post.is_preference:
            rows = f"{train.batch_size:,} pairs x 2 x {config.window:,} tokens"
            baseline = self._describe_objective(config)
        elif config.post.is_distillation:
            baseline = _distillation(config)
        else:
            V = config.model.vocab_size
            baseline = f"uniform baseline: ln {V:,} = {math.log(V):.2f}"

        text = f"{data.characters:,} characters, " if data.characters else ""
        held_out = f"{len(data.val):,} validation tokens" if data.held_out else "no validation tokens"

        # Before the checkpoint, steps may have had a different batch size.
        steps = f"{train.steps:,} steps of {rows}"
        rows_before = self.last.tokens // config.row_tokens
        steps_left = train.steps - self.last.step
        epochs = (rows_before + steps_left * train.batch_size) / Batches.of(config, data.train).per_epoch
        length = f"{epochs:.3g} epochs"
        if rows_before != self.last.step * train.batch_size:
            steps = f"{steps_left:,} more steps of {rows}"
            length += " in total"
        return [
            data.source,
            f"{text}{len(data.train):,} training tokens, {held_out}, vocabulary of {data.tokenizer.vocab_size:,}",
            f"{steps}: {length}",
            baseline,
            self._describe_reference(config, epochs),
        ]

    def _describe_objective(self, config: Config) -> str:
        """Return the objective of a run on preference pairs, its reference, and the loss of equal scores."""
        post = config.post
        text = f"objective: {post.objective}, beta {post.beta:g}"
        if post.has_reference and config.lora.rank:
            text += ", reference: the frozen base"
        elif post.has_reference:
            text += f", reference: {post.reference or 'the initial weights'}"
        if post.objective == "orpo" or post.sft:
            return text
        equal = float(pair_loss(jnp.zeros((1, 2)), post)[0])
        return f"{text}; loss without a preference: {equal:.4f}"

    def _describe_reference(self, config: Config, epochs: float) -> str:
        """Return when a run on preference pairs computes its reference, or "" without a reference."""
        post = config.post
        if not (post.is_preference and post.has_reference):
            return ""
        if is_once(config):
            kept = "" if config.lora.rank else ", so no copy is in memory during training"
            return f"reference: computed once for each pair, before the first step{kept}"
        text = "reference: computed at every step"
        if not config.lora.rank:
            return f"{text}, from a copy of the weights in memory"
        if epochs > 1:
            return f"{text}, {epochs:.3g} times for each pair; --post.reference-log-p once computes it once"
        return text

    def _describe_rollouts(self, config: Config) -> list[str]:
        """Return lines about the rollouts and the objective of a run with rewards or a teacher."""
        post = config.post
        train = config.train
        objective = _distillation(config)
        if post.has_rewards:
            kl = f", kl {post.kl:g} ({post.kl_estimator})" if post.kl else ""
            objective = f"objective: {post.objective}, reward {' '.join(post.reward)}{kl}"
        return [
            f"{train.steps:,} steps of {train.batch_size:,} answers; {plural(train.steps_per_call, 'step')} per rollout of "
            f"{config.rollout_answers:,} answers, {post.answers_per_prompt} to each prompt, "
            f"{plural(post.rollout_epochs, 'epoch')}",
            objective,
        ]

    def _describe_devices(self) -> str:
        """Return the number and kind of the devices, the mesh and the number of processes."""
        mesh = self.program.mesh
        devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({jax.default_backend()})"
        split = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
        if split:
            devices += f": {split}"
        if process_count() > 1:
            devices += f", in {process_count()} processes"
        return devices


def _distillation(config: Config) -> str:
    """Return a line about the objective of a distillation."""
    post = config.post
    beta = f" (beta {post.jsd_beta:g})" if post.divergence == "jsd" else ""
    return f"objective: {post.objective}, {post.divergence} divergence{beta} from {post.reference}"
