"""Every setting of the program, once: frozen dataclasses, checked when they are made, JSON both ways.

The same names are used in `config.json` (underscores) and on the command line (`--model.n-layer`). A value that cannot
work raises `UserError` with one line that names the setting, the value and the way out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxgpt.strict import UserError as UserError
from jaxgpt.strict import did_you_mean as did_you_mean
from jaxgpt.strict import parse_json, shown

MAX_LAYERS = 1024  # the deepest published decoders have some hundreds; each is traced by itself
MAX_HEAD = 2**16  # published heads are some hundreds wide; RoPE's angles are as many, and there before any weight is
MAX_VOCAB = 2**24  # ids; the largest published vocabularies have some 2**18
MAX_PARAMETERS = 10**13  # 40 TB in float32
MAX_BATCH = 2**28  # ids in the batch of an update, 1 GB of int32


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder: what is computed, nothing about how it is trained. The defaults are GPT-2's choices, small."""

    vocab_size: int = 0  # V, token ids; 0: as many as the tokenizer has
    block_size: int = 256  # context length in tokens
    n_layer: int = 4  # L, blocks
    n_head: int = 4  # N, attention heads (queries)
    n_kv_head: int = 0  # heads of keys and values, for grouped-query attention; 0: n_head
    n_embd: int = 128  # D, width of the residual stream
    head_dim: int = 0  # H, width of a head; 0: n_embd / n_head
    n_inner: int = 0  # F, width of the MLP; 0: 4 * n_embd
    positions: Literal["learned", "sinusoidal", "rope", "none"] = "learned"  # how a token's place is told
    rope_theta: float = 10_000.0  # base of RoPE's wavelengths
    rope_factor: float = 1.0  # llama3 scaling of RoPE: long wavelengths are stretched by this; 1: off
    rope_low_freq_factor: float = 1.0  # llama3: wavelengths over rope_original_context / this are stretched in full
    rope_high_freq_factor: float = 4.0  # llama3: wavelengths under rope_original_context / this stay as they are
    rope_original_context: int = 8192  # llama3: the context length before scaling, in tokens
    norm: Literal["layernorm", "rmsnorm", "stdnorm", "none"] = "layernorm"  # stdnorm divides by (std + eps)
    norm_position: Literal["pre", "post"] = "pre"  # before each sublayer, or after its residual sum
    norm_affine: bool = True  # norms have a learned gain (and, with bias, a learned offset)
    norm_eps: float = 1e-5  # added to the variance (stdnorm: to the standard deviation)
    final_norm: bool = True  # a norm after the last block
    qk_norm: bool = False  # RMSNorm over each head's queries and keys, before RoPE
    mlp: Literal["plain", "gated", "none"] = "plain"  # gated: act(x W_g) * (x W_u), as in SwiGLU
    activation: Literal["gelu", "gelu_new", "relu", "relu2", "silu"] = "gelu_new"  # gelu is exact, gelu_new is tanh
    bias: bool = True  # biases in attention, MLP and LayerNorm
    attn_proj: bool = True  # the output projection of attention
    tie_embeddings: bool = True  # the head is the token embedding
    head_bias: bool = False  # a bias on the (untied) head
    scale_attn_weights: bool = True  # divide scores by sqrt(head_dim)
    scale_attn_by_inverse_layer_idx: bool = False  # divide scores by (layer + 1) as well
    logit_softcap: float = 0.0  # logits become c * tanh(logits / c); 0: off
    sliding_window: int = 0  # a token sees this many tokens, itself included; 0: all before it
    dropout: float = 0.0  # on embeddings, attention weights and sublayer outputs
    init: Literal["gpt2", "torch", "zero-proj"] = "gpt2"  # zero-proj: gpt2 with residual projections at zero
    init_std: float = 0.02  # standard deviation of gpt2's initial weights

    def __post_init__(self) -> None:
        _types(self, "model")
        _bounds("model", self, "n_layer", 1, MAX_LAYERS)
        _bounds("model", self, "vocab_size", 0, MAX_VOCAB)
        for name in ("block_size", "n_head", "n_embd", "rope_original_context"):
            _bounds("model", self, name, 1, 2**24)
        for name in ("n_kv_head", "n_inner", "sliding_window"):
            _bounds("model", self, name, 0, 2**31 - 1)
        _bounds("model", self, "head_dim", 0, MAX_HEAD)
        _bounds("model", self, "dropout", 0.0, 1.0, open_end=True)
        for name in ("norm_eps", "init_std", "logit_softcap"):
            _bounds("model", self, name, 0.0, 1e6)
        for name in ("rope_theta", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor"):
            _bounds("model", self, name, 1e-6, 1e12)
        if not self.head_dim and self.n_embd % self.n_head:
            raise UserError(
                f"model.n_head {self.n_head} does not divide model.n_embd {self.n_embd}: "
                f"choose a divisor, or set model.head_dim"
            )
        if self.n_head % self.kv_heads:
            raise UserError(f"model.n_kv_head {self.n_kv_head} does not divide model.n_head {self.n_head}")
        if not self.attn_proj and self.n_head * self.head_width != self.n_embd:
            raise UserError(
                f"model.attn_proj is off, so n_head * head_dim {self.n_head * self.head_width} must equal "
                f"model.n_embd {self.n_embd}"
            )
        if self.positions == "rope" and self.head_width % 2:
            raise UserError(f"positions 'rope' turns pairs of coordinates: head_dim {self.head_width} must be even")
        if self.positions == "sinusoidal" and self.n_embd % 2:
            raise UserError(f"positions 'sinusoidal' needs an even model.n_embd, not {self.n_embd}")
        if self.tie_embeddings and self.head_bias:
            raise UserError("model.head_bias needs an untied head: set model.tie_embeddings to false")
        if self.rope_factor != 1.0 and self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise UserError(
                f"model.rope_low_freq_factor {self.rope_low_freq_factor} must be below "
                f"model.rope_high_freq_factor {self.rope_high_freq_factor}"
            )
        if self.parameters > MAX_PARAMETERS:
            raise UserError(
                f"the model would have {self.parameters:.1e} parameters, {4 * self.parameters / 1e12:,.0f} TB in "
                f"float32: at most {MAX_PARAMETERS:.0e} are allowed; lower model.n_embd, n_layer, n_inner or block_size"
            )

    @property
    def kv_heads(self) -> int:
        """K, heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        """H, width of one head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def mlp_width(self) -> int:
        """F, width of the MLP's hidden layer."""
        return self.n_inner or 4 * self.n_embd

    @property
    def parameters(self) -> int:
        """How many numbers are learned; with a vocabulary that is not known yet, those besides its."""
        D, F, V, bias = self.n_embd, self.mlp_width, self.vocab_size, int(self.bias)
        heads, gain = self.n_head * self.head_width, int(self.norm_affine)
        norm = gain * D * (1 + (bias and self.norm != "rmsnorm")) * (self.norm != "none")
        attention = (D + bias) * (heads + 2 * self.kv_heads * self.head_width)
        attention += self.attn_proj * (heads + bias) * D + self.qk_norm * gain * 2 * self.head_width
        mlp = (1 + (self.mlp == "gated")) * (D + bias) * F + (F + bias) * D + norm if self.mlp != "none" else 0
        ends = V * D + (self.positions == "learned") * self.block_size * D + self.final_norm * norm
        ends += (not self.tie_embeddings) * (D + self.head_bias) * V
        return self.n_layer * (attention + norm + mlp) + ends


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text to ids to windows."""

    dataset: Literal["python", "shakespeare", "statquest", "none"] = "python"  # where text comes from without a path
    path: str = ""  # a text file, a folder of text, or token files (.bin); empty: the dataset's own source
    tokenizer: str = "char"  # char, word, byte, gpt2, bpe (trained here), ids, or a tokenizer.json / its folder
    vocab_size: int = 4096  # ids of a tokenizer that is trained here (bpe)
    train_fraction: float = 0.9  # of the ids, from the start, for training; 1: all, and evaluation is on them too
    sampling: Literal["epoch", "random"] = "epoch"  # windows without replacement, or drawn anew for every batch
    stride: int = 0  # ids from one window's start to the next; 0: block_size, with a fresh phase every epoch

    def __post_init__(self) -> None:
        _types(self, "data")
        _bounds("data", self, "train_fraction", 0.0, 1.0, open_start=True)
        _bounds("data", self, "vocab_size", 2, MAX_VOCAB)
        _bounds("data", self, "stride", 0, 2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """From gradients to an update."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, with AdamW for the rest
    learning_rate: float = 1e-3  # peak of the schedule
    min_lr: float = 1e-4  # where the schedule ends
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"  # wsd: warm up, stay, then decay linearly
    warmup_steps: int = 100  # linear from learning_rate / (warmup_steps + 1)
    decay_steps: int = 0  # step at which min_lr is reached; 0: train.steps
    cooldown_steps: int = 0  # wsd: length of the last decay; 0: a fifth of decay_steps
    beta1: float = 0.9  # Adam: decay of the first moment
    beta2: float = 0.99  # Adam: decay of the second moment
    eps: float = 1e-8  # Adam: added to the root of the second moment
    weight_decay: float = 0.1  # decoupled, on matrices and embeddings; gains and biases are spared
    grad_clip: float = 1.0  # largest global norm of the gradient; 0: off
    muon_learning_rate: float = 0.02  # Muon: peak for the blocks' matrices, on the same schedule
    muon_momentum: float = 0.95  # Muon: decay of the momentum
    muon_steps: int = 5  # Muon: Newton-Schulz iterations
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"  # how Adam's first moment and Muon's momentum are kept
    ema_decay: float = 0.0  # average of the weights, used to evaluate and sample; 0: off
    not_finite: Literal["stop", "skip"] = "stop"  # a loss or gradient that is not finite: stop, or skip the update
    spike_factor: float = 0.0  # skip an update whose loss or gradient norm is over so many running means; 0: off
    skip_limit: int = 10  # updates skipped in a row at which training stops

    def __post_init__(self) -> None:
        _types(self, "optim")
        for name in ("learning_rate", "muon_learning_rate", "eps"):
            _bounds("optim", self, name, 0.0, 1e3, open_start=True)
        for name in ("min_lr", "weight_decay", "grad_clip"):
            _bounds("optim", self, name, 0.0, 1e6)
        for name in ("beta1", "beta2", "muon_momentum", "ema_decay"):
            _bounds("optim", self, name, 0.0, 1.0, open_end=True)
        for name in ("warmup_steps", "decay_steps", "cooldown_steps"):
            _bounds("optim", self, name, 0, 2**31 - 1)
        _bounds("optim", self, "muon_steps", 1, 100)
        _bounds("optim", self, "skip_limit", 1, 2**31 - 1)
        if self.spike_factor:
            _bounds("optim", self, "spike_factor", 1.0, 1e6, open_start=True)
        if self.schedule != "constant" and self.min_lr > self.learning_rate:
            raise UserError(f"optim.min_lr {self.min_lr:g} is above optim.learning_rate {self.learning_rate:g}")

    @property
    def guarded(self) -> bool:
        """Whether updates can be left out."""
        return self.not_finite == "skip" or self.spike_factor > 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run."""

    steps: int = 1000  # updates
    batch_size: int = 32  # windows in one update, over all devices
    accumulation: int = 1  # pieces in which an update's batch is worked through; the result is the same
    steps_per_call: int = 1  # updates that the devices make by themselves; more where the host takes long beside a step
    eval_every: int = 250  # steps between evaluations; the last step always has one, of the whole validation split
    eval_windows: int = 0  # windows, spread over the validation split, of the evaluations before that one; 0: all
    eval_batch_size: int = 0  # windows at once in evaluation; 0: as in training
    log_every: int = 10  # steps between lines of metrics.jsonl
    checkpoint_every: int = 0  # steps between checkpoints; 0: with every evaluation
    checkpoint_seconds: float = 0.0  # a temporary checkpoint when the last one is so old, until the next one; 0: none
    keep_last: int = 2  # checkpoints that stay: the last
    keep_best: int = 1  # checkpoints that stay: those of the lowest validation loss
    keep_every: int = 0  # checkpoints that stay: those of every so many steps; 0: none for that
    seed: int = 1337  # of the weights, the batches and the dropout masks, each from a stream of its own name
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of matrix products; weights are float32 always
    attention: Literal["auto", "xla", "cudnn", "splash", "tiled"] = "auto"  # of GPU, TPU, CPU; xla: any
    remat: Literal["none", "dots", "offload", "full"] = "none"  # what the backward pass computes again
    scan_layers: bool = False  # one compiled block for all layers: deep models compile faster; slower on a CPU
    loss_chunk: int = 0  # positions of a window whose logits are held at once (costs a product more); 0: all
    prompt: str = "\n"  # a sample from this is printed at the end
    sample_tokens: int = 300  # length of that sample; 0: none

    def __post_init__(self) -> None:
        _types(self, "train")
        for name in (
            "steps",
            "batch_size",
            "accumulation",
            "steps_per_call",
            "eval_every",
            "log_every",
            "keep_last",
        ):
            _bounds("train", self, name, 1, 2**31 - 1)
        for name in (
            "seed",
            "checkpoint_every",
            "sample_tokens",
            "eval_windows",
            "eval_batch_size",
            "keep_best",
            "keep_every",
            "loss_chunk",
        ):
            _bounds("train", self, name, 0, 2**31 - 1)
        _bounds("train", self, "checkpoint_seconds", 0.0, 1e9)
        if self.batch_size % self.accumulation:
            raise UserError(
                f"train.accumulation {self.accumulation} does not divide train.batch_size {self.batch_size}"
            )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each way of splitting the work; -1 once: all that are left."""

    data: int = -1  # the batch is split, the weights are repeated
    fsdp: int = 1  # the batch and the weights are split
    tensor: int = 1  # heads, MLP and vocabulary are split

    def __post_init__(self) -> None:
        _types(self, "mesh")
        for f in fields(self):
            if getattr(self, f.name) < 1 and getattr(self, f.name) != -1:
                raise UserError(f"mesh.{f.name} must be at least 1, or -1 for the rest, not {getattr(self, f.name)}")
        if sum(getattr(self, f.name) == -1 for f in fields(self)) > 1:
            raise UserError("only one of mesh.data, mesh.fsdp and mesh.tensor can be -1 (the rest)")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a run find one another. No part of the run: it may go on with another number of them."""

    coordinator: str = (
        ""  # HOST:PORT of process 0; auto: as JAX finds it; none: alone; empty: auto under Slurm, MPI, GKE
    )
    num_processes: int = 0  # processes of the run, with a coordinator of HOST:PORT
    process_id: int = -1  # which of them this is, from 0
    bind: str = ""  # ADDRESS:PORT on which process 0 listens; empty: the coordinator's (auto: on all its addresses)
    join_seconds: int = 300  # for which processes wait for one another at the start
    heartbeat_seconds: int = 30  # without a sign of life from a process, after which the others stop
    launched: bool = False  # by jaxgpt launch, which holds standard input open: when it closes, save and stop

    def __post_init__(self) -> None:
        _types(self, "distributed")
        for name in ("join_seconds", "heartbeat_seconds"):
            _bounds("distributed", self, name, 2, 86400)
        if self.coordinator in ("", "auto", "none"):
            if self.num_processes or self.process_id != -1:
                raise UserError(
                    "distributed.num_processes and process_id need a distributed.coordinator: HOST:PORT of process 0"
                )
            return
        _bounds("distributed", self, "num_processes", 1, 2**20)
        _bounds("distributed", self, "process_id", 0, self.num_processes - 1)
        for name in ("coordinator", "bind"):
            host, _, port = getattr(self, name).rpartition(":")
            if getattr(self, name) and not (host and port.isdecimal() and 0 < int(port) < 2**16):
                raise UserError(f"distributed.{name} must be HOST:PORT, auto or none, not {shown(getattr(self, name))}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. `config.json` in a run directory is this, as JSON."""

    preset: str = ""  # the preset this began as
    model: ModelConfig = field(default_factory=ModelConfig)  # the decoder
    data: DataConfig = field(default_factory=DataConfig)  # text to windows
    optim: OptimConfig = field(default_factory=OptimConfig)  # gradients to updates
    train: TrainConfig = field(default_factory=TrainConfig)  # the run
    mesh: MeshConfig = field(default_factory=MeshConfig)  # devices

    def __post_init__(self) -> None:
        _types(self, "config")
        ids = self.train.steps_per_call * self.train.batch_size * (self.model.block_size + 1)
        if ids > MAX_BATCH:
            several = self.train.steps_per_call > 1
            calls = f"train.steps_per_call {self.train.steps_per_call} times " if several else ""
            raise UserError(
                f"{calls}train.batch_size {self.train.batch_size} windows of model.block_size {self.model.block_size} "
                f"+ 1 are {ids:,} ids: at most {MAX_BATCH:,} are put into {'a call' if several else 'an update'}"
            )

    @property
    def decay_steps(self) -> int:
        """Step at which the schedule ends."""
        return self.optim.decay_steps or self.train.steps

    def with_model(self, **changes: Any) -> Config:
        """The same run with some of the model's settings replaced."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, **changes))


def to_json(config: Any) -> str:
    """A config as indented JSON, keys in the order of the dataclass."""
    return json.dumps(dataclasses.asdict(config), indent=2, allow_nan=False) + "\n"


def flat(config: Any) -> dict[str, Any]:
    """A config's settings by their names, `{"model.n_layer": 6, ...}`."""
    names = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    sections = {name: flat(value) for name, value in names.items() if dataclasses.is_dataclass(value)}
    nested = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in names.items() if name not in sections} | nested


def from_json(text: bytes | str, where: str = "config.json") -> Config:
    """Read a `Config` back. Missing keys take their defaults; unknown ones are errors.

    Raises:
        UserError: not JSON, not an object, an unknown key (with a near one named) or a value that cannot work.
    """
    return _build(Config, parse_json(text, where), where)


def _build(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: expected an object, found {type(data).__name__}")
    names = [f.name for f in fields(cls)]
    hints = get_type_hints(cls)
    for key in data:
        if key not in names:
            raise UserError(f"{where}: unknown key {shown(key)}{did_you_mean(key, names)}")
    values = {}
    for key, value in data.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            value = _build(hint, value, f"{where}: {key}")  # type: ignore[arg-type]
        elif hint is float and type(value) is int:
            value = float(value)  # JSON does not tell 1 from 1.0
        values[key] = value
    return cls(**values)


def _types(config: Any, section: str) -> None:
    """Every value has the type that its field declares (a bool is no int; an int is a fine float)."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                known = ", ".join(str(a) for a in get_args(hint))
                near = did_you_mean(value, get_args(hint)) if isinstance(value, str) else ""
                raise UserError(f"{section}.{name} cannot be {shown(value)}{near}: one of {known}")
        elif hint is float:
            # Compared, not asked for finiteness: a NaN fails this, and a whole number of any size can be asked it.
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
                raise UserError(f"{section}.{name} must be a finite number, not {shown(value)}")
        elif type(value) is not hint:
            raise UserError(f"{section}.{name} must be of type {hint.__name__}, not {shown(value)}")
        elif isinstance(value, str) and not _is_text(value):
            raise UserError(f"{section}.{name} {shown(value)} holds what is no character of a text or a path")


def _is_text(value: str) -> bool:
    """No NUL, and no half of a surrogate pair (which stands for a byte of an argument that is not UTF-8)."""
    return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)


def _bounds(
    section: str, config: Any, name: str, low: float, high: float, *, open_start: bool = False, open_end: bool = False
) -> None:
    value = getattr(config, name)
    if value < low or value > high or (open_start and value == low) or (open_end and value == high):
        start, end = ("above" if open_start else "at least"), ("below" if open_end else "at most")
        raise UserError(f"{section}.{name} must be {start} {low:g} and {end} {high:g}, not {shown(value)}")
