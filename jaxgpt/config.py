"""Settings of runs: frozen dataclasses with validation.

The setting `n_layer` of the section `model` in `config.json` is the option `--model.n-layer` on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from jaxgpt.data_settings import OF_CHATS as OF_CHATS  # this module exports all settings and options
from jaxgpt.data_settings import DataConfig as DataConfig
from jaxgpt.data_settings import place_of as place_of
from jaxgpt.errors import UserError, short_repr
from jaxgpt.options import BeamParams as BeamParams
from jaxgpt.options import DistributedConfig as DistributedConfig
from jaxgpt.options import PrepareParams as PrepareParams
from jaxgpt.options import SamplingParams as SamplingParams
from jaxgpt.options import TextParams as TextParams
from jaxgpt.post_settings import PostConfig as PostConfig
from jaxgpt.settings import MAX_VOCAB, Section, setting, similar_setting

MAX_LAYERS = 1024  # maximum n_layer, to limit tracing time; published decoders: at most a few hundred
MAX_HEAD = 2**16  # maximum head_dim, to limit the RoPE frequencies allocated before weights are checked
MAX_PARAMETERS = 10**13  # maximum number of parameters, 40 TB in float32
MAX_BATCH = 2**28  # maximum number of token ids per jitted call, 1 GiB of int32


# Names in the registries of jaxgpt/ops, and "none". A program may add functions: docs/own/activation.md, docs/own/norm.md.
NormName = Literal["layernorm", "rmsnorm", "stdnorm", "none"]
ActivationName = Literal["gelu", "gelu_new", "relu", "relu2", "silu"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Model architecture, initialization and dropout; by default, a small GPT-2 without dropout."""

    prefix = "model"

    vocab_size: int = setting(0, "V, number of token ids; 0: taken from the tokenizer", 0, MAX_VOCAB)
    block_size: int = setting(256, "context length in tokens", 1, 2**24)
    n_layer: int = setting(4, "L, number of blocks", 1, MAX_LAYERS)
    n_head: int = setting(4, "N, number of query heads", 1, 2**24)
    n_kv_head: int = setting(0, "K, number of key/value heads, for grouped-query attention; 0: n_head", 0)
    n_embd: int = setting(128, "D, width of the residual stream", 1, 2**24)
    head_dim: int = setting(0, "H, width of one attention head; 0: n_embd / n_head", 0, MAX_HEAD)
    n_inner: int = setting(0, "F, hidden width of the MLP; 0: 4 * n_embd", 0)
    positions: Literal["learned", "sinusoidal", "rope", "none"] = setting("learned", "position encoding")
    rope_theta: float = setting(10_000.0, "RoPE: base of the wavelengths", 1e-6, 1e12)
    rope_local_theta: float = setting(0.0, "RoPE: base in layers with a sliding window; 0: rope_theta", 0.0, 1e12)
    rope_fraction: float = setting(1.0, "RoPE: fraction of a head's channels that are rotated", above=0.0, high=1.0)
    rope_factor: float = setting(1.0, "scaling of RoPE: factor of long wavelengths; 1: off", 1e-6, 1e12)
    rope_scaling: Literal["llama3", "yarn"] = setting("llama3", "kind of scaling of RoPE, if rope_factor is not 1")
    rope_low_freq_factor: float = setting(
        1.0, "Llama 3: scale wavelengths above rope_original_context / this", 1e-6, 1e12
    )
    rope_high_freq_factor: float = setting(
        4.0, "Llama 3: keep wavelengths below rope_original_context / this", 1e-6, 1e12
    )
    rope_beta_slow: float = setting(
        1.0, "YaRN: scale wavelengths with fewer turns in rope_original_context", 1e-6, 1e12
    )
    rope_beta_fast: float = setting(32.0, "YaRN: keep wavelengths with more turns in rope_original_context", 1e-6, 1e12)
    rope_attention_factor: float = setting(
        0.0, "YaRN: factor of queries and keys; 0: 1 + 0.1 ln(rope_factor)", 0.0, 1e6
    )
    rope_original_context: int = setting(8192, "scaling of RoPE: context length before scaling, in tokens", 1, 2**24)
    norm: NormName = setting("layernorm", "normalization layer; stdnorm divides by (std + eps)")
    norm_position: Literal["pre", "post", "output", "both"] = setting(
        "pre", "pre: inputs of sublayers; post: residual sums; output: outputs of sublayers; both: inputs and outputs"
    )
    norm_affine: bool = setting(True, "learn a gain in each norm and, with model.bias, a bias (not RMSNorm)")
    norm_eps: float = setting(1e-5, "epsilon added to the variance; stdnorm: to the standard deviation", 0.0, 1e6)
    final_norm: bool = setting(True, "normalize after the last block")
    qk_norm: bool = setting(False, "RMSNorm on queries and keys, before RoPE")
    qk_norm_per_head: bool = setting(True, "qk_norm: normalize each head separately; false: across heads")
    mlp: Literal["plain", "gated", "none"] = setting("plain", "gated: act(x W_g) * (x W_u), as in SwiGLU")
    activation: ActivationName = setting("gelu_new", "MLP activation; gelu_new: tanh approximation of gelu")
    n_experts: int = setting(0, "E, number of experts; each computes some of the tokens; 0: one MLP", 0, 2**16)
    experts_per_token: int = setting(2, "A, number of experts that compute each token", 1, 2**16)
    shared_experts: int = setting(0, "experts that compute every token: one MLP of this many times the width", 0, 2**16)
    router: Literal["softmax", "sigmoid"] = setting("softmax", "scores of the experts, from the router's logits")
    router_normalize: bool = setting(True, "divide the scores of a token's experts by their sum")
    router_scale: float = setting(1.0, "factor of the scores of a token's experts", above=0.0, high=1e6)
    router_bias: bool = setting(False, "choose experts by score plus a bias that evens out their load")
    parallel_residual: bool = setting(False, "parallel sublayers: x + attn(norm(x)) + mlp(norm(x))")
    bias: bool = setting(True, "add biases in attention, MLP and norms (not RMSNorm)")
    qkv_bias: bool = setting(False, "add biases to query, key and value projections even if model.bias is false")
    attn_proj: bool = setting(True, "add an output projection to attention")
    embed_scale: bool = setting(False, "multiply token embeddings by sqrt(n_embd)")
    tie_embeddings: bool = setting(True, "share the token embedding with the output head")
    head_bias: bool = setting(False, "add a bias to the output head, which must be untied")
    scale_attn_weights: bool = setting(True, "divide attention scores by sqrt(head_dim)")
    scale_attn_by_inverse_layer_idx: bool = setting(False, "also divide attention scores by (layer index + 1)")
    logit_softcap: float = setting(0.0, "soft-cap the logits: c * tanh(logits / c); 0: off", 0.0, 1e6)
    sliding_window: int = setting(0, "tokens that each token attends to, including itself; 0: no limit", 0)
    window_pattern: str = setting("L", "repeated pattern of layers, such as LLLLLG; L: sliding window, G: no window")
    dropout: float = setting(0.0, "dropout rate on embeddings, attention weights and sublayer outputs", 0.0, below=1.0)
    init: Literal["gpt2", "torch", "zero-proj"] = setting("gpt2", "zero-proj: gpt2, with residual projections at zero")
    init_std: float = setting(0.02, "standard deviation of the gpt2 initialization", 0.0, 1e6)

    def check(self) -> Iterator[str]:
        yield from self._check_heads()
        if self.positions == "sinusoidal" and self.n_embd % 2:
            yield f"model.positions 'sinusoidal' needs an even model.n_embd, not {self.n_embd}"
        if self.tie_embeddings and self.head_bias:
            yield "model.head_bias needs an untied head: set model.tie_embeddings to false"
        if self.n_experts:
            yield from self._check_experts()
        if self.parallel_residual and self.norm_position == "post":
            yield "model.parallel_residual needs model.norm_position pre, output or both, not post"
        yield from self._check_rope_scaling()
        yield from self._check_windows()
        # Use the lower bound: the exact count would trace the initialization of the weights.
        if self.least_parameters > MAX_PARAMETERS:
            size = f"at least {self.least_parameters:.1e} parameters"
            yield f"the model has {size}: at most {MAX_PARAMETERS:.0e} are allowed; lower model.n_embd"

    def _check_heads(self) -> Iterator[str]:
        """Yield the errors of the numbers and widths of attention heads."""
        if not self.head_dim and self.n_embd % self.n_head:
            yield f"model.n_head {self.n_head} does not divide model.n_embd {self.n_embd}: choose a divisor or set head_dim"
        if self.n_head % self.kv_heads:
            yield f"model.n_kv_head {self.n_kv_head} does not divide model.n_head {self.n_head}: choose a divisor"
        if not self.attn_proj and self.n_head * self.head_width != self.n_embd:
            yield f"without model.attn_proj, n_head * head_dim must equal model.n_embd {self.n_embd}"
        if self.positions == "rope" and (self.rotary_width % 2 or not self.rotary_width):
            rotated = f"rotates {self.rotary_width} of the {self.head_width} channels of a head"
            yield f"model.rope_fraction {self.rope_fraction:g} {rotated}: the number must be even and above 0"

    def _check_windows(self) -> Iterator[str]:
        """Yield the errors of the sliding windows of the layers."""
        if not re.fullmatch(f"[LG]{{1,{MAX_LAYERS}}}", self.window_pattern):
            letters = "the letters L (local) and G (global)"
            yield f"model.window_pattern must consist of {letters}, not {short_repr(self.window_pattern)}"
        for name in ("window_pattern", "rope_local_theta"):
            default = getattr(ModelConfig, name)
            if getattr(self, name) != default and not self.sliding_window:
                yield f"model.{name} needs a model.sliding_window: set it, or set model.{name} to {default}"

    def _check_rope_scaling(self) -> Iterator[str]:
        """Yield the errors of the bounds between which RoPE is scaled."""
        if self.rope_scaling == "yarn":
            if self.rope_factor == 1.0:
                yield "model.rope_scaling yarn needs a model.rope_factor other than 1: set it to the growth of the context"
            if self.rope_theta <= 1.0:
                yield f"model.rope_scaling yarn needs a model.rope_theta above 1, not {self.rope_theta:g}"
            if self.rope_beta_slow >= self.rope_beta_fast:
                yield f"model.rope_beta_slow {self.rope_beta_slow:g} must be below rope_beta_fast {self.rope_beta_fast:g}"
        elif self.rope_factor != 1.0 and self.rope_low_freq_factor >= self.rope_high_freq_factor:
            yield (
                f"model.rope_low_freq_factor {self.rope_low_freq_factor} must be below rope_high_freq_factor "
                f"{self.rope_high_freq_factor}"
            )

    def _check_experts(self) -> Iterator[str]:
        """Yield the errors of settings that a model with experts does not support."""
        if self.mlp == "none":
            yield "model.n_experts needs an MLP: set model.mlp to gated or plain"
        if self.bias:
            yield "model.n_experts needs MLPs without biases: set model.bias to false"
        if self.experts_per_token > self.n_experts:
            yield f"model.experts_per_token {self.experts_per_token} exceeds model.n_experts {self.n_experts}: lower it"

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding window of each layer in tokens; 0: no limit."""
        pattern = self.window_pattern
        return tuple(self.sliding_window * (pattern[i % len(pattern)] == "L") for i in range(self.n_layer))

    @property
    def rotary_width(self) -> int:
        """Number of channels of a head that RoPE rotates."""
        return int(self.head_width * self.rope_fraction)

    @property
    def kv_heads(self) -> int:
        """K, number of key/value heads."""
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        """H, width of one attention head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def mlp_width(self) -> int:
        """F, hidden width of the MLP."""
        return self.n_inner or 4 * self.n_embd

    @property
    def least_parameters(self) -> int:
        """A lower bound on the number of parameters: the largest matrices. `count_parameters` in model/params.py is exact."""
        widest = self.n_head * self.head_width
        if self.mlp != "none":
            widest = max(widest, self.mlp_width * max(self.n_experts, 1))
        rows = self.vocab_size + self.n_layer * widest
        if self.positions == "learned":
            rows += self.block_size
        return rows * self.n_embd


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
    schedule: Literal["cosine", "linear", "wsd", "constant"] = setting("cosine", "wsd: stable, then linear decay")
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
        0.0, "skip updates with loss or gradient norm above this times its running mean; 0: off", 0.0, 1e6
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
    eval_every: int = setting(250, "steps between evaluations; the last evaluation uses the whole split", 1)
    patience: int = setting(0, "stop after this many evaluations without a lower validation loss; 0: off", 0)
    eval_windows: int = setting(0, "validation windows per evaluation, except the last; 0: all", 0)
    eval_batch_size: int = setting(0, "windows per evaluation batch; 0: as in a microbatch of training", 0)
    log_every: int = setting(10, "steps between lines of metrics.jsonl", 1)
    checkpoint_every: int = setting(0, "steps between additional checkpoints; 0: only at evaluations", 0)
    checkpoint_seconds: float = setting(0.0, "also save this many seconds after the last checkpoint; 0: off", 0.0, 1e9)
    keep_last: int = setting(2, "number of most recent checkpoints to keep", 1)
    keep_best: int = setting(1, "number of checkpoints with the lowest validation loss to keep", 0)
    keep_every: int = setting(0, "also keep the checkpoints at multiples of this step; 0: off", 0)
    seed: int = setting(1337, "random seed of the initial weights, the batches and dropout", 0)
    compute_dtype: Literal["float32", "bfloat16"] = setting("float32", "dtype of matrix products; weights are float32")
    attention: Literal["auto", "xla", "cudnn", "splash", "tiled", "gathered", "halo", "ring"] = setting(
        "auto",
        "cudnn: GPU; splash: TPU; tiled: CPU; gathered, halo, ring: mesh.context; xla: any device; auto: the fastest",
    )
    remat: Literal["none", "dots", "offload", "full"] = setting(
        "none",
        "none: save all activations; dots: recompute all except matrix products and attention kernels; offload: as dots, "
        "with the products in host memory; full: recompute all",
    )
    scan_layers: bool = setting(False, "compile one block for all layers: faster to compile, slower on a CPU")
    loss_chunk: int = setting(0, "compute logits of this many positions at a time, to save memory; 0: all at once", 0)
    prompt: str = setting("\n", "prompt of the final sample; newline: the beginning of the validation data")
    sample_tokens: int = setting(300, "number of tokens in the final sample; 0: no sample", 0)

    def check(self) -> Iterator[str]:
        if self.patience and not self.keep_best:
            yield "train.patience needs the best checkpoint: set train.keep_best to 1 or more"


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Device mesh: number of devices along each axis."""

    prefix = "mesh"

    data: int = setting(-1, "devices that split the batch and replicate the weights; -1: all remaining devices", -1)
    fsdp: int = setting(1, "devices that split both the batch and the weights; -1: all remaining devices", -1)
    expert: int = setting(1, "devices that split both the batch and the experts of each block", 1)
    context: int = setting(1, "devices that split the positions of each window", 1)
    tensor: int = setting(1, "devices that split heads, MLP and vocabulary; -1: all remaining devices", -1)

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


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Settings of a run, saved as `config.json` in the run directory."""

    prefix = "config"

    preset: str = setting("", "preset that the run was started from")
    init_from: str = setting("", "checkpoint of the initial weights, RUN/checkpoints/STEP; empty: random weights")
    state_from: str = setting("", "checkpoint of the initial weights and optimizer state; empty: a new optimizer")
    directory: str = setting("", "directory that relative paths of the data refer to; empty: the current directory")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    post: PostConfig = field(default_factory=PostConfig)

    def check(self) -> Iterator[str]:
        if self.train.scan_layers and len(set(self.model.windows)) > 1:
            pattern = f"not model.window_pattern {self.model.window_pattern}"
            yield f"train.scan_layers needs the same sliding window in all layers, {pattern}: set scan_layers to false"
        if self.data.window > self.model.block_size:
            yield f"data.window {self.data.window} exceeds model.block_size {self.model.block_size}: lower it"
        if self.lora.rank and self.optim.name == "muon":
            yield "optim.name muon does not support adapters (lora.rank): use --optim.name adamw"
        experts = self.model.n_experts
        if self.mesh.expert > 1 and (not experts or experts % self.mesh.expert):
            yield f"mesh.expert {self.mesh.expert} must divide the number of experts, model.n_experts {experts}"
        yield from self._check_context()
        yield from self._check_objective()
        windows = max(self.train.steps_per_call * self.train.batch_size, self.train.eval_batch_size)
        ids = windows * (self.row_tokens + 1)
        if ids > MAX_BATCH:
            yield (
                f"{windows:,} windows of {self.window_setting} are {ids:,} token ids: at most "
                f"{MAX_BATCH:,} are allowed; lower train.batch_size, steps_per_call or eval_batch_size"
            )

    def _check_objective(self) -> Iterator[str]:
        """Yield the errors of settings that the objective does not support."""
        post = self.post
        if self.lora.rank and post.reference and post.objective != "distill":
            yield "with lora.rank, the frozen base is the reference: omit post.reference, or train all weights"
        if (post.is_preference or post.is_rollout) and self.data.documents != "flow":
            yield f"data.documents {self.data.documents} does not apply to post.objective {post.objective}: omit it"
        if post.is_rollout:
            yield from self._check_rollouts()

    @property
    def window(self) -> int:
        """T, tokens per training window."""
        return self.data.window or self.model.block_size

    def _check_context(self) -> Iterator[str]:
        """Yield the error of a window that the axis `context` of the mesh does not divide: each device has two equal chunks."""
        chunks = 2 * self.mesh.context
        if self.mesh.context == 1 or self.window % chunks == 0:
            return
        fix = f"use a multiple of {chunks}, or --mesh.context 1"
        yield f"{self.window_setting} is not a multiple of 2 x mesh.context {self.mesh.context}: {fix}"

    def _check_rollouts(self) -> Iterator[str]:
        """Yield the errors of settings that do not fit rollouts: each call of the step takes the answers of one rollout."""
        train = self.train
        steps = train.steps_per_call
        if steps % self.post.rollout_epochs:
            yield (
                f"train.steps_per_call {steps}, the steps of a rollout, must be a multiple of post.rollout_epochs "
                f"{self.post.rollout_epochs}"
            )
        if self.rollout_answers % self.post.group:
            yield (
                f"a rollout of {self.rollout_answers} answers (train.batch_size x train.steps_per_call / post.rollout_epochs) "
                f"must be a multiple of post.group {self.post.group}"
            )
        for name in ("steps", "eval_every", "checkpoint_every"):
            number = getattr(train, name)
            if number % steps:
                yield f"train.{name} {number} must be a multiple of train.steps_per_call {steps}"
        if train.epochs:
            yield "train.epochs does not apply to rollouts: use train.steps"
        if self.data.mix:
            yield "data.mix does not apply to rollouts: write all prompts to one path"
        if train.scan_layers or self.model.dropout:
            name = "train.scan_layers" if train.scan_layers else "model.dropout"
            yield f"{name} does not apply to rollouts, which need the weights and log probabilities of training: turn it off"
        if self.optim.spike_factor:
            yield "optim.spike_factor does not apply to rollouts, because their loss may be negative: set it to 0"

    @property
    def rollout_answers(self) -> int:
        """Number of answers of a rollout."""
        return self.train.batch_size * self.train.steps_per_call // self.post.rollout_epochs

    @property
    def row_tokens(self) -> int:
        """Tokens per row of a batch: a window, or two windows with the answers of a preference pair."""
        return 2 * self.window if self.post.is_preference else self.window

    @property
    def window_setting(self) -> str:
        """The name and value of the setting that defines the length of the training window."""
        return f"data.window {self.window}" if self.data.window else f"model.block_size {self.window}"

    @property
    def has_documents(self) -> bool:
        """Whether windows have document ids; windows of conversations always do."""
        sources = [replace(each, path=place_of(each.path, self.directory)) for each in self.data.sources]
        return self.data.documents != "flow" or any(each.conversations for each in sources)

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches `min_lr`, unless the schedule is constant."""
        return self.optim.decay_steps or self.train.steps

    def with_model(self, **changes: Any) -> Config:
        """Return a copy with changed model settings."""
        return replace(self, model=replace(self.model, **changes))

    def with_settings(self, given: Mapping[str, Any]) -> Config:
        """Return a copy with changed settings, keyed by dotted name: `{"train.steps": 10}`.

        A new data.path removes data.mix, and a new data.mix removes data.path, unless both are given.

        Raises:
            UserError: if a setting is unknown, its value is invalid, or settings conflict.
        """
        given = dict(given)
        for name, other, empty in (("data.path", "data.mix", ()), ("data.mix", "data.path", "")):
            if name in given:
                given.setdefault(other, empty)
        if given.get("train.epochs") and "train.steps" in given:
            raise UserError("train.steps and train.epochs both set the length of the run: omit one of them")

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
            changed[section] = replace(getattr(self, section), **values)
        return replace(self, **changed)


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


def changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return a dict of the old and new values of changed settings, keyed by dotted name.

    If the last mixture of `data.mix` differs, the values are the last mixtures, not the schedules.
    """
    before = flat(old)
    after = flat(new)
    was = old.data.phases[-1].words
    now = new.data.phases[-1].words
    if was != now:
        before["data.mix"] = was
        after["data.mix"] = now
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}
