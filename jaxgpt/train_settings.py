"""Settings of training: optimizer, steps, device mesh and adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from jaxgpt.errors import UserError, short_repr
from jaxgpt.settings import Section, setting


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Optimizer and learning rate schedule."""

    prefix = "optim"

    name: Literal["adamw", "muon", "lion", "sgd", "adafactor"] = setting(
        "adamw", "muon: Muon for matrices of the blocks, AdamW for the remaining weights"
    )
    learning_rate: float = setting(
        1e-3,
        "peak learning rate; Muon: rate of embeddings, head and vectors; Adafactor: multiplied by RMS(W)",
        above=0.0,
        high=1e3,
    )
    min_lr: float = setting(1e-4, "final learning rate of the schedule", 0.0, 1e6)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = setting("cosine", "wsd: constant, then linear decay")
    warmup_steps: int = setting(100, "steps of linear warmup, starting at learning_rate / (warmup_steps + 1)", 0)
    decay_steps: int = setting(0, "step at which min_lr is reached; 0: train.steps", 0)
    cooldown_steps: int = setting(0, "wsd: steps of the final decay; 0: a fifth of decay_steps", 0)
    beta1: float = setting(0.9, "AdamW: first-moment decay; Lion: weight of momentum; SGD: momentum", 0.0, below=1.0)
    beta2: float = setting(0.99, "AdamW: second-moment decay; Lion: momentum decay", 0.0, below=1.0)
    eps: float = setting(1e-8, "AdamW: epsilon added to the root of the second moment", above=0.0, high=1e3)
    weight_decay: float = setting(0.1, "decoupled weight decay of matrices and embeddings", 0.0, 1e6)
    grad_clip: float = setting(1.0, "clip gradients to this global norm; 0: off", 0.0, 1e6)
    muon_ratio: float = setting(5.0, "Muon: learning rate of matrices, relative to learning_rate", above=0.0, high=1e3)
    muon_momentum: float = setting(0.95, "Muon: momentum decay rate", 0.0, below=1.0)
    muon_steps: int = setting(5, "Muon: Newton-Schulz iterations", 1, 100)
    balance_loss: float = setting(0.01, "experts: factor of the load-balancing loss, minimized with the loss", 0.0, 1e6)
    router_z_loss: float = setting(0.0, "experts: factor of the router's z-loss, minimized with the loss", 0.0, 1e6)
    router_bias_rate: float = setting(1e-3, "experts: change of a router bias per step (model.router_bias)", 0.0, 1e3)
    momentum_dtype: Literal["float32", "bfloat16"] = setting("float32", "storage type of the first moment or momentum")
    ema_decay: float = setting(0.0, "decay rate of an EMA of the weights, for evaluation; 0: off", 0.0, below=1.0)
    not_finite: Literal["stop", "skip"] = setting("stop", "on a non-finite loss or gradient: stop, or skip the update")
    spike_factor: float = setting(
        0.0, "skip updates with loss or gradient norm above this multiple of its running mean; 0: off", 0.0, 1e6
    )
    skip_limit: int = setting(10, "stop training after this many consecutive skipped steps", 1)

    def check(self) -> Iterator[str]:
        if 0 < self.spike_factor <= 1:
            yield f"optim.spike_factor must be 0 (off) or above 1, not {self.spike_factor:g}"
        if self.schedule != "constant" and self.min_lr > self.learning_rate:
            yield f"optim.min_lr {self.min_lr:g} is above optim.learning_rate {self.learning_rate:g}: lower it"

    @property
    def skips_updates(self) -> bool:
        """Whether non-finite updates (`not_finite`) or spikes (`spike_factor`) are skipped."""
        return self.not_finite == "skip" or self.spike_factor > 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Training, evaluation, checkpoints and precision."""

    prefix = "train"

    steps: int = setting(1000, "optimizer steps", 1)
    epochs: float = setting(0.0, "passes over the training data, instead of train.steps; 0: use train.steps", 0.0, 1e6)
    batch_size: int = setting(32, "windows per optimizer step, over all devices", 1)
    accumulation: int = setting(1, "gradient accumulation: microbatches per step, divided among the devices", 1)
    steps_per_call: int = setting(1, "optimizer steps per jitted call; raise it if host overhead dominates", 1)
    eval_every: int = setting(
        250, "steps between evaluations; the evaluation after the last step uses the complete split", 1
    )
    patience: int = setting(
        0, "stop after this many evaluations without a lower validation loss (with rewards, higher reward); 0: off", 0
    )
    eval_windows: int = setting(0, "validation windows per evaluation, except the last; 0: all", 0)
    eval_batch_size: int = setting(0, "windows per evaluation batch; 0: as in a microbatch of training", 0)
    log_every: int = setting(10, "steps between lines of metrics.jsonl", 1)
    checkpoint_every: int = setting(0, "steps between additional checkpoints; 0: only at evaluations", 0)
    checkpoint_seconds: float = setting(0.0, "also save this many seconds after the last checkpoint; 0: off", 0.0, 1e9)
    keep_last: int = setting(2, "number of most recent checkpoints to keep", 1)
    keep_best: int = setting(
        1, "number of checkpoints to keep with the lowest validation loss (with rewards, highest reward)", 0
    )
    keep_every: int = setting(0, "also keep the checkpoints at multiples of this step; 0: off", 0)
    seed: int = setting(
        1337, "random seed of the initial weights, the batches, dropout, rollouts and the final sample", 0
    )
    compute_dtype: Literal["float32", "bfloat16"] = setting("float32", "dtype of matrix products; weights are float32")
    attention: Literal["auto", "xla", "cudnn", "splash", "tiled", "gathered", "halo", "ring"] = setting(
        "auto",
        "cudnn: GPU; splash: TPU; tiled: CPU; gathered, halo, ring: mesh.context; xla: any device; auto: the fastest available",
    )
    remat: Literal["none", "dots", "offload", "full"] = setting(
        "none",
        "none: save all activations; dots: recompute all except matrix products and attention kernels; offload: as dots, "
        "with the products in host memory; full: recompute all",
    )
    scan_layers: bool = setting(False, "compile one block for all layers: faster to compile, slower on a CPU")
    loss_chunk: int = setting(0, "compute logits of this many positions at a time, to save memory; 0: all positions", 0)
    prompt: str = setting(
        "\n", "prompt of the final sample; newline: first words of a line of the validation data, or its first prompt"
    )
    sample_tokens: int = setting(300, "maximum number of new tokens in the final sample; 0: no sample", 0)

    def check(self) -> Iterator[str]:
        if self.patience and not self.keep_best:
            yield "train.patience needs the best checkpoint: set train.keep_best to 1 or more"

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with changed values, keyed by field; raise `UserError` if both `steps` and `epochs` are given."""
        if values.get("epochs") and "steps" in values:
            raise UserError("train.steps and train.epochs both set the length of the run: omit one of them")
        return super().with_values(values)


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Device mesh: number of devices along each axis."""

    prefix = "mesh"

    data: int = setting(-1, "devices that split the batch and replicate the weights; -1: the remaining devices", -1)
    fsdp: int = setting(
        1, "devices that split both the batch and the weights; -1: the remaining devices that divide the width", -1
    )
    expert: int = setting(1, "devices that split both the batch and the experts of each block", 1)
    context: int = setting(1, "devices that split the positions of each window", 1)
    tensor: int = setting(
        1, "devices that split heads, MLP and vocabulary; -1: the remaining devices that divide these", -1
    )

    def check(self) -> Iterator[str]:
        for axis, size in vars(self).items():
            if size == 0:
                yield f"mesh.{axis} must be at least 1, or -1 for all remaining devices, not 0"
        if self.fsdp == self.tensor == -1:
            yield "only one of mesh.fsdp and mesh.tensor can be -1 (all remaining devices): set the other to a number"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """LoRA: train low-rank adapters A and B of the `--init-from` weights W: `W + (alpha / rank) A B`."""

    prefix = "lora"

    rank: int = setting(0, "rank of the adapters; 0: no adapters, train all weights", 0, 2**24)
    alpha: float = setting(16.0, "factor of the adapters: A B is multiplied by alpha / rank", above=0.0, high=1e6)
    targets: str = setting("q_proj,v_proj", "matrices to adapt, comma-separated, or all-linear")

    def check(self) -> Iterator[str]:
        names = self.targets.replace("+", ",").split(",")
        if len(set(names)) < len(names) or "" in names:
            yield f"lora.targets must be distinct names separated by commas, not {short_repr(self.targets)}"
        for name in ("alpha", "targets"):
            if not self.rank and getattr(self, name) != getattr(LoraConfig, name):
                yield f"lora.{name} needs lora.rank: add --lora.rank 8, or omit lora.{name}"
