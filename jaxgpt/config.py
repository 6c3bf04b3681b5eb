"""Settings of runs: `Config` and its sections, frozen dataclasses with validation.

The setting `n_layer` of the section `model` in `config.json` is the option `--model.n-layer` on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from jaxgpt.data_settings import OF_CHATS as OF_CHATS  # this module exports all settings and options
from jaxgpt.data_settings import DataConfig as DataConfig
from jaxgpt.distributed_options import DistributedConfig as DistributedConfig
from jaxgpt.errors import UserError
from jaxgpt.model_settings import ModelConfig as ModelConfig
from jaxgpt.options import BeamParams as BeamParams
from jaxgpt.options import SamplingParams as SamplingParams
from jaxgpt.options import TextParams as TextParams
from jaxgpt.post_settings import PostConfig as PostConfig
from jaxgpt.prepare_options import PrepareParams as PrepareParams
from jaxgpt.settings import Section, setting
from jaxgpt.suggestions import similar_setting
from jaxgpt.train_settings import LoraConfig as LoraConfig
from jaxgpt.train_settings import MeshConfig as MeshConfig
from jaxgpt.train_settings import OptimConfig as OptimConfig
from jaxgpt.train_settings import TrainConfig as TrainConfig

MAX_BATCH = 2**28  # maximum number of token ids per jitted call, 1 GiB of int32


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Settings of a run, saved as `config.json` in the run directory."""

    prefix = "config"

    preset: str = setting("", "preset that the run was started from")
    init_from: str = setting(
        "", "checkpoint of the initial weights, RUN/checkpoints/STEP; empty: random weights", private=True
    )
    state_from: str = setting(
        "", "checkpoint of the initial weights and optimizer state; empty: a new optimizer", private=True
    )
    directory: str = setting(
        "", "directory that relative paths of the data refer to; empty: the current directory", private=True
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    post: PostConfig = field(default_factory=PostConfig)

    @property
    def window(self) -> int:
        """T, tokens per training window."""
        return self.data.window or self.model.block_size

    @property
    def window_setting(self) -> str:
        """The name and value of the setting that defines the length of the training window."""
        return f"data.window {self.window}" if self.data.window else f"model.block_size {self.window}"

    @property
    def row_tokens(self) -> int:
        """Tokens per row of a batch: a window, or two windows with the answers of a preference pair."""
        return 2 * self.window if self.post.is_preference else self.window

    @property
    def rollout_answers(self) -> int:
        """Number of answers per rollout: train.batch_size * train.steps_per_call / post.rollout_epochs."""
        return self.train.batch_size * self.train.steps_per_call // self.post.rollout_epochs

    @property
    def computes_reference_once(self) -> bool:
        """Whether the reference of preference pairs is computed once per pair, before training (`post.reference_log_p`)."""
        if not (self.post.is_preference and self.post.has_reference):
            return False
        if self.post.reference_log_p == "auto":
            return not self.lora.rank
        return self.post.reference_log_p == "once"

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches `min_lr`, unless the schedule is constant."""
        return self.optim.decay_steps or self.train.steps

    def with_model(self, **changes: Any) -> Config:
        """Return a copy with changed model settings."""
        return replace(self, model=replace(self.model, **changes))

    def with_settings(self, given: Mapping[str, Any]) -> Config:
        """Return a copy with changed settings, keyed by dotted name: `{"train.steps": 10}`.

        Some settings remove or exclude others: see `DataConfig.with_values` and `TrainConfig.with_values`.

        Raises:
            UserError: if a setting is unknown, its value is invalid, or settings conflict.
        """
        # Sort the settings by section; the settings of `Config` itself have no section.
        known = flat(self)
        by_section: dict[str, dict[str, Any]] = {}
        for name, value in given.items():
            if name not in known:
                raise UserError(f"unknown setting {name}{similar_setting(name, known)}")
            section, _, last = name.rpartition(".")
            by_section.setdefault(section, {})[last] = value

        changed = by_section.pop("", {})
        for section, values in by_section.items():
            changed[section] = getattr(self, section).with_values(values)
        return replace(self, **changed)

    def check(self) -> Iterator[str]:
        if self.train.scan_layers and len(set(self.model.windows)) > 1:
            pattern = f"not model.window_pattern {self.model.window_pattern}"
            yield f"train.scan_layers needs the same sliding window in all layers, {pattern}: set scan_layers to false"
        if self.data.window > self.model.block_size:
            yield f"data.window {self.data.window} exceeds model.block_size {self.model.block_size}: lower it"
        if self.lora.rank and self.optim.name == "muon":
            yield "optim.name muon does not support adapters (lora.rank): use --optim.name adamw"
        yield from self._check_mesh()
        yield from self._check_objective()
        yield from self._check_batch()

    def _check_mesh(self) -> Iterator[str]:
        """Yield the errors of mesh axes that do not divide the experts or the windows."""
        experts = self.model.n_experts
        if self.mesh.expert > 1 and (not experts or experts % self.mesh.expert):
            fix = "use a divisor, or --mesh.expert 1"
            yield f"mesh.expert {self.mesh.expert} must divide the number of experts, model.n_experts {experts}: {fix}"

        # Each device along `context` computes two equal chunks of a window.
        chunks = 2 * self.mesh.context
        if self.mesh.context > 1 and self.window % chunks:
            fix = f"use a multiple of {chunks}, or --mesh.context 1"
            yield f"{self.window_setting} is not a multiple of 2 x mesh.context {self.mesh.context}: {fix}"

    def _check_objective(self) -> Iterator[str]:
        """Yield the errors of settings that the objective does not support."""
        post = self.post
        if self.lora.rank and post.reference and not post.is_distillation:
            yield "with lora.rank, the frozen base is the reference: omit post.reference, or train all weights"
        if (post.is_preference or post.is_rollout) and self.data.documents != "flow":
            yield f"data.documents {self.data.documents} does not apply to post.objective {post.objective}: omit it"
        if post.is_rollout:
            yield from self._check_rollouts()

    def _check_rollouts(self) -> Iterator[str]:
        """Yield the errors of settings that do not fit rollouts."""
        yield from self._check_rollout_steps()
        if self.data.mix:
            yield "data.mix does not apply to rollouts: write all prompts to one path"
        with_dropout = self.model.dropout > 0 and self.post.has_rewards
        if self.train.scan_layers or with_dropout:
            name = "train.scan_layers" if self.train.scan_layers else "model.dropout"
            yield f"{name} does not apply to rollouts, which need the weights and log probabilities of training: turn it off"
        if self.optim.spike_factor and self.post.has_rewards:
            yield "optim.spike_factor does not apply to rollouts, because their loss may be negative: set it to 0"

    def _check_rollout_steps(self) -> Iterator[str]:
        """Yield the errors of step counts: each jitted call trains on the answers of one rollout."""
        train = self.train
        steps = train.steps_per_call
        if steps % self.post.rollout_epochs:
            yield (
                f"train.steps_per_call {steps}, the steps of a rollout, must be a multiple of post.rollout_epochs "
                f"{self.post.rollout_epochs}: change one of them"
            )
        if self.rollout_answers % self.post.answers_per_prompt:
            yield (
                f"a rollout of {self.rollout_answers} answers (train.batch_size x train.steps_per_call / post.rollout_epochs) "
                f"must be a multiple of post.group {self.post.group}: change --train.batch-size or --post.group"
            )
        for name in ("steps", "eval_every", "checkpoint_every"):
            number = getattr(train, name)
            if number % steps:
                yield f"train.{name} {number} must be a multiple of train.steps_per_call {steps}: change one of them"
        if train.epochs:
            yield "train.epochs does not apply to rollouts: use train.steps"

    def _check_batch(self) -> Iterator[str]:
        """Yield an error if the batches of a jitted call are too large."""
        windows = max(self.train.steps_per_call * self.train.batch_size, self.train.eval_batch_size)
        ids = windows * (self.row_tokens + 1)
        if ids > MAX_BATCH:
            yield (
                f"{windows:,} windows of {self.window_setting} are {ids:,} token ids: at most "
                f"{MAX_BATCH:,} are allowed; lower train.batch_size, steps_per_call or eval_batch_size"
            )


def flat(config: Any) -> dict[str, Any]:
    """Flatten a config to `{"model.n_layer": 6, ...}`, without `directory`, which is a fact about the run, not a setting."""
    own: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            nested |= {f"{f.name}.{key}": each for key, each in flat(value).items()}
        elif f.name != "directory":
            own[f.name] = value
    return own | nested
