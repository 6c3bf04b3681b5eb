"""Settings of a run: frozen dataclasses that validate their values, and conversion to and from JSON.

Names are the same in `config.json` (`n_layer`) and on the command line (`--model.n-layer`). The comment beside a field is
its help text. An invalid value raises `UserError` with one line that names the setting, the value and the fix.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxgpt.errors import UserError as UserError
from jaxgpt.errors import as_float, as_int, short_repr
from jaxgpt.errors import did_you_mean as did_you_mean
from jaxgpt.files import parse_json

T = TypeVar("T")

MAX_LAYERS = 1024  # the deepest published decoders have a few hundred; each layer is traced separately
MAX_HEAD = 2**16  # published heads are a few hundred wide; RoPE computes its angles before any weights are allocated
MAX_VOCAB = 2**24  # the largest published vocabularies have about 2**18 ids
MAX_PARAMETERS = 10**13  # 40 TB in float32
MAX_BATCH = 2**28  # token ids per batch, 1 GB of int32
MAX_TOKENS = 2**24  # tokens of one generated text; equals the maximum context length
MIX_PARTS = 2**20  # the weights of a mixture are integers with at most this sum
MAX_ROWS = 2**16  # texts generated for one prompt

NEW_TOKENS = 200  # default number of new tokens, if they fit the context
SEED = 1337  # default seed for sampling
Overflow = Literal["error", "slide"]  # when a text exceeds the context: raise an error, or slide the window

# Names of functions in jaxgpt/ops. A program may add its own: docs/own/activation.md, docs/own/norm.md.
NormName = Literal["layernorm", "rmsnorm", "stdnorm", "none"]
ActivationName = Literal["gelu", "gelu_new", "relu", "relu2", "silu"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model architecture, initialization and dropout. The defaults are GPT-2's choices at a small size."""

    vocab_size: int = 0  # V, number of token ids; 0: taken from the tokenizer
    block_size: int = 256  # context length in tokens
    n_layer: int = 4  # L, number of blocks
    n_head: int = 4  # N, number of attention (query) heads
    n_kv_head: int = 0  # K, number of key/value heads, for grouped-query attention; 0: n_head
    n_embd: int = 128  # D, width of the residual stream
    head_dim: int = 0  # H, width of one attention head; 0: n_embd / n_head
    n_inner: int = 0  # F, hidden width of the MLP; 0: 4 * n_embd
    positions: Literal["learned", "sinusoidal", "rope", "none"] = "learned"  # position encoding
    rope_theta: float = 10_000.0  # RoPE: base of the wavelengths
    # RoPE: base in the layers with a sliding window, where Llama 3 scaling is off; 0: as in the other layers
    rope_local_theta: float = 0.0
    rope_fraction: float = 1.0  # RoPE: fraction of the channels of a head that are rotated, the first ones
    rope_factor: float = 1.0  # RoPE, Llama 3 scaling: stretch long wavelengths by this factor; 1: off
    # Llama 3 scaling: wavelengths above rope_original_context / this are scaled in full
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0  # Llama 3 scaling: wavelengths below rope_original_context / this are not scaled
    rope_original_context: int = 8192  # Llama 3 scaling: context length before scaling, in tokens
    # normalization layer; stdnorm divides by (std + eps)
    norm: NormName = "layernorm"
    # pre: normalize each sublayer's input; post: normalize after each residual sum; output: normalize each sublayer's
    # output before the sum; both: input and output
    norm_position: Literal["pre", "post", "output", "both"] = "pre"
    norm_affine: bool = True  # learn a gain (and, with bias, an offset) in each norm
    norm_eps: float = 1e-5  # epsilon added to the variance (stdnorm: to the standard deviation)
    final_norm: bool = True  # normalize after the last block
    qk_norm: bool = False  # RMSNorm on queries and keys, before RoPE
    qk_norm_per_head: bool = True  # qk_norm: normalize each head by itself; false: all heads together
    mlp: Literal["plain", "gated", "none"] = "plain"  # MLP of a block; gated: act(x W_g) * (x W_u), as in SwiGLU
    # MLP activation; gelu is exact, gelu_new the tanh approximation
    activation: ActivationName = "gelu_new"
    # compute attention and MLP from the same residual stream: x + attn(norm(x)) + mlp(norm(x))
    parallel_residual: bool = False
    bias: bool = True  # add biases in attention, MLP and LayerNorm
    qkv_bias: bool = False  # add biases to the query, key and value projections even if bias is false
    attn_proj: bool = True  # project the output of attention
    embed_scale: bool = False  # multiply token embeddings by sqrt(n_embd)
    tie_embeddings: bool = True  # share the token embedding with the output head
    head_bias: bool = False  # add a bias to the output head (needs an untied head)
    scale_attn_weights: bool = True  # divide attention scores by sqrt(head_dim)
    scale_attn_by_inverse_layer_idx: bool = False  # also divide attention scores by (layer index + 1)
    logit_softcap: float = 0.0  # soft-cap the logits: c * tanh(logits / c); 0: off
    sliding_window: int = 0  # tokens each token attends to, itself included; 0: all previous tokens
    # layers with the sliding window: L local, G global (all previous tokens); repeated for all layers, such as LLLLLG
    window_pattern: str = "L"
    dropout: float = 0.0  # dropout rate on embeddings, attention weights and sublayer outputs
    # weight initialization; zero-proj: gpt2, with residual projections at zero
    init: Literal["gpt2", "torch", "zero-proj"] = "gpt2"
    init_std: float = 0.02  # standard deviation of the gpt2 initialization

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
        _bounds("model", self, "rope_local_theta", 0.0, 1e12)
        _bounds("model", self, "rope_fraction", 0.0, 1.0, open_start=True)
        for name in ("rope_theta", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor"):
            _bounds("model", self, name, 1e-6, 1e12)
        if not self.head_dim and self.n_embd % self.n_head:
            raise UserError(
                f"model.n_head {self.n_head} does not divide model.n_embd {self.n_embd}: "
                f"choose a divisor, or set model.head_dim"
            )
        if self.n_head % self.kv_heads:
            raise UserError(
                f"model.n_kv_head {self.n_kv_head} does not divide model.n_head {self.n_head}: choose a divisor"
            )
        if not self.attn_proj and self.n_head * self.head_width != self.n_embd:
            raise UserError(
                f"model.attn_proj is off, so n_head * head_dim {self.n_head * self.head_width} must equal "
                f"model.n_embd {self.n_embd}"
            )
        if self.positions == "rope" and self.rope_fraction == 1.0 and self.head_width % 2:
            raise UserError(f"model.positions 'rope' needs an even head_dim, not {self.head_width}")
        if self.positions == "rope" and (self.rotary_width % 2 or not self.rotary_width):
            raise UserError(
                f"model.rope_fraction {self.rope_fraction:g} rotates {self.rotary_width} of the {self.head_width} channels "
                f"of a head: choose a fraction that gives an even number above 0"
            )
        if self.positions == "sinusoidal" and self.n_embd % 2:
            raise UserError(f"model.positions 'sinusoidal' needs an even model.n_embd, not {self.n_embd}")
        if self.tie_embeddings and self.head_bias:
            raise UserError("model.head_bias needs an untied head: set model.tie_embeddings to false")
        if self.parallel_residual and self.norm_position == "post":
            raise UserError(
                "model.parallel_residual does not support model.norm_position post: use pre, output or both"
            )
        self._check_windows()
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

    def _check_windows(self) -> None:
        pattern = self.window_pattern
        if not pattern or set(pattern) - set("LG") or len(pattern) > MAX_LAYERS:
            raise UserError(
                f"model.window_pattern must consist of the letters L (local) and G (global), at most {MAX_LAYERS} of them, "
                f"not {short_repr(pattern)}"
            )
        for name, default in (("window_pattern", "L"), ("rope_local_theta", 0.0)):
            if getattr(self, name) != default and not self.sliding_window:
                raise UserError(
                    f"model.{name} {short_repr(getattr(self, name))} needs a model.sliding_window: set one, or "
                    f"set model.{name} to {default}"
                )

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer; 0: all previous tokens."""
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
    def parameters(self) -> int:
        """Number of trainable parameters, without those of the vocabulary if `vocab_size` is 0."""
        D, F, V, bias = self.n_embd, self.mlp_width, self.vocab_size, int(self.bias)
        heads, gain = self.n_head * self.head_width, int(self.norm_affine)
        norm = gain * D * (1 + (bias and self.norm != "rmsnorm")) * (self.norm != "none")
        norms, kv = norm * (1 + (self.norm_position == "both")), self.kv_heads * self.head_width
        attention = (D + (bias or self.qkv_bias)) * (heads + 2 * kv) + self.attn_proj * (heads + bias) * D
        attention += self.qk_norm * gain * (2 * self.head_width if self.qk_norm_per_head else heads + kv)
        mlp = (1 + (self.mlp == "gated")) * (D + bias) * F + (F + bias) * D + norms if self.mlp != "none" else 0
        ends = V * D + (self.positions == "learned") * self.block_size * D + self.final_norm * norm
        ends += (not self.tie_embeddings) * (D + self.head_bias) * V
        return self.n_layer * (attention + norms + mlp) + ends


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, tokenizer and training windows."""

    # built-in text to use when no path is given
    dataset: Literal["python", "shakespeare", "statquest", "repeats", "none"] = "python"
    # text file, folder of text files, token files (.bin) or conversations (.jsonl); empty: the built-in dataset
    path: str = ""
    # several paths to mix, each with its share of the training windows: --data.mix web=0.7 code=0.3
    mix: tuple[str, ...] = ()
    tokenizer: str = "char"  # char, word, byte, gpt2, bpe (trained on the text), ids, or a tokenizer.json or its folder
    vocab_size: int = 4096  # vocabulary size of a BPE tokenizer trained on the text
    # leading fraction of the tokens used for training; 1: train and evaluate on all of them
    train_fraction: float = 0.9
    # epoch: windows without replacement; random: windows drawn independently
    sampling: Literal["epoch", "random"] = "epoch"
    stride: int = 0  # tokens between the starts of consecutive windows; 0: block_size, with a new offset each epoch
    # flow: documents follow one another in a window; mask: attention, positions and targets do not cross their boundaries,
    # as is always the case for conversations; pack: as mask, with short documents whole in a window
    documents: Literal["flow", "mask", "pack"] = "flow"

    def __post_init__(self) -> None:
        _types(self, "data")
        _bounds("data", self, "train_fraction", 0.0, 1.0, open_start=True)
        _bounds("data", self, "vocab_size", 2, MAX_VOCAB)
        _bounds("data", self, "stride", 0, 2**31 - 1)
        if self.stride and (self.conversations or self.documents == "pack"):
            what = "conversations" if self.conversations else "documents"
            raise UserError(
                f"data.stride {self.stride} does not apply to {what}, which are packed whole into windows: set it to 0"
            )
        if self.path and self.mix:
            raise UserError(f"data.path {self.path} and data.mix both name the data: leave one of them out")
        paths = [each.path for each, _ in self.sources]
        if len(set(paths)) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise UserError(f"data.mix names {twice} twice: add up its weights")

    @property
    def sources(self) -> list[tuple[DataConfig, int]]:
        """The settings of each source of `mix`, and its weight as an integer.

        Weights of few digits are kept exactly; others are rounded to a millionth of their sum.
        """
        words = [word.rpartition("=") for word in self.mix]
        for word, (path, _, weight) in zip(self.mix, words, strict=True):
            if not path or not re.fullmatch(r"\d+\.?\d*|\.\d+", weight) or not 0 < float(weight) <= 1e6:
                raise UserError(
                    f"data.mix needs PATH=WEIGHT with a weight above 0 and at most 1e6, not {short_repr(word)}"
                )
        exact = [Fraction(weight) for _, _, weight in words]
        total = math.lcm(*(weight.denominator for weight in exact))
        if sum(exact) * total > MIX_PARTS:
            exact, total = [weight / sum(exact) for weight in exact], MIX_PARTS
        return [
            (dataclasses.replace(self, path=path, mix=()), max(round(weight * total), 1))
            for (path, _, _), weight in zip(words, exact, strict=True)
        ]

    @property
    def conversations(self) -> bool:
        """Whether the path is a file of conversations."""
        return self.path.lower().endswith((".jsonl", ".ndjson"))

    @property
    def segmented(self) -> bool:
        """Whether windows have segment ids; those of conversations always do."""
        return self.documents != "flow" or self.conversations or any(each.segmented for each, _ in self.sources)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate schedule."""

    # optimizer; muon: Muon for the matrices of the blocks, AdamW for the rest
    name: Literal["adamw", "muon", "lion", "sgd", "adafactor"] = "adamw"
    # peak learning rate of the schedule (lion: about a tenth of AdamW's; adafactor: relative to the RMS of each weight)
    learning_rate: float = 1e-3
    min_lr: float = 1e-4  # final learning rate of the schedule
    # learning rate schedule; wsd: warmup, stable, then linear decay
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int = 100  # steps of linear warmup, from learning_rate / (warmup_steps + 1)
    decay_steps: int = 0  # step at which min_lr is reached; 0: train.steps
    cooldown_steps: int = 0  # wsd: steps of the final decay; 0: a fifth of decay_steps
    beta1: float = 0.9  # decay rate of the first moment (AdamW, Lion); momentum (SGD)
    beta2: float = 0.99  # decay rate of the second moment (AdamW), of the momentum (Lion)
    eps: float = 1e-8  # epsilon added to the square root of the second moment (AdamW)
    weight_decay: float = 0.1  # decoupled weight decay on matrices and embeddings (not on gains and biases)
    grad_clip: float = 1.0  # clip gradients to this global norm; 0: off
    muon_learning_rate: float = 0.02  # Muon: peak learning rate of the blocks' matrices, on the same schedule
    muon_momentum: float = 0.95  # Muon: momentum decay rate
    muon_steps: int = 5  # Muon: Newton-Schulz iterations
    # storage type of the first moment or momentum (Adafactor has none)
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    # decay rate of an exponential moving average of the weights, used to evaluate and sample; 0: off
    ema_decay: float = 0.0
    not_finite: Literal["stop", "skip"] = "stop"  # on a non-finite loss or gradient: stop training, or skip the step
    # skip steps whose loss or gradient norm exceeds this multiple of its running mean; 0: off
    spike_factor: float = 0.0
    skip_limit: int = 10  # stop training after this many skipped steps in a row

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
    def skips_updates(self) -> bool:
        """Whether bad updates are skipped."""
        return self.not_finite == "skip" or self.spike_factor > 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training, evaluation, checkpoints and precision."""

    steps: int = 1000  # optimizer steps
    batch_size: int = 32  # windows per optimizer step, over all devices
    # maximum windows per device and microbatch; 0: one microbatch; -K: K microbatches on any number of devices
    microbatch: int = 0
    steps_per_call: int = 1  # optimizer steps per jitted call; raise it if host overhead dominates short steps
    eval_every: int = 250  # steps between evaluations; the last step always evaluates the whole validation split
    eval_windows: int = 0  # validation windows per evaluation, except the last; 0: all
    eval_batch_size: int = 0  # windows per batch in evaluation; 0: as in training
    log_every: int = 10  # steps between lines of metrics.jsonl
    checkpoint_every: int = 0  # steps between checkpoints; 0: at every evaluation
    checkpoint_seconds: float = 0.0  # also save if this many seconds have passed since the last checkpoint; 0: off
    keep_last: int = 2  # number of most recent checkpoints to keep
    keep_best: int = 1  # number of checkpoints with the lowest validation loss to keep
    keep_every: int = 0  # also keep the checkpoints at multiples of this step; 0: off
    seed: int = 1337  # random seed of the initial weights, the batches and dropout
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of matrix products; weights are always float32
    # attention kernel: cudnn (GPU), splash (TPU), tiled (CPU), xla (any); auto: the fastest for this device
    attention: Literal["auto", "xla", "cudnn", "splash", "tiled"] = "auto"
    # activations to recompute, to save memory: dots keeps matrix products, offload keeps them on the host, full keeps none
    remat: Literal["none", "dots", "offload", "full"] = "none"
    scan_layers: bool = False  # compile one block for all layers: faster compilation of deep models, slower on a CPU
    loss_chunk: int = 0  # compute logits for this many positions at a time, to save memory; 0: all at once
    prompt: str = "\n"  # prompt of the sample printed at the end
    sample_tokens: int = 300  # number of tokens in that sample; 0: no sample

    def __post_init__(self) -> None:
        _types(self, "train")
        for name in (
            "steps",
            "batch_size",
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
        _bounds("train", self, "microbatch", -(2**31), 2**31 - 1)
        if self.microbatch < 0 and self.batch_size % self.microbatch:
            raise UserError(
                f"train.microbatch {self.microbatch}: {-self.microbatch} microbatches do not divide "
                f"train.batch_size {self.batch_size}; use a divisor, or the number of windows per device, such as 12"
            )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Device mesh: number of devices along each axis."""

    data: int = -1  # devices that split the batch and replicate the weights; -1: all remaining devices
    fsdp: int = 1  # devices that split both the batch and the weights; -1: all remaining devices
    tensor: int = 1  # devices that split heads, MLP and vocabulary; -1: all remaining devices

    def __post_init__(self) -> None:
        _types(self, "mesh")
        for f in fields(self):
            if getattr(self, f.name) < 1 and getattr(self, f.name) != -1:
                raise UserError(
                    f"mesh.{f.name} must be at least 1, or -1 for all remaining devices, not {getattr(self, f.name)}"
                )
        if self.fsdp == self.tensor == -1:
            raise UserError("only one of mesh.fsdp and mesh.tensor can be -1 (all remaining devices)")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: train low-rank adapters A and B of the weights of `--init-from`, used as W + (alpha / rank) A B."""

    rank: int = 0  # rank of the adapters; 0: no adapters, train all weights
    alpha: float = 16.0  # scale of the adapters, divided by the rank
    # names of the matrices to adapt, separated by commas, as info prints them or as in transformers; or all-linear
    targets: str = "q_proj,v_proj"

    def __post_init__(self) -> None:
        _types(self, "lora")
        _bounds("lora", self, "rank", 0, 2**24)
        _bounds("lora", self, "alpha", 0.0, 1e6, open_start=True)
        names = self.targets.replace("+", ",").split(",")
        if len(set(names)) < len(names) or "" in names:
            raise UserError(f"lora.targets must be different names separated by commas, not {short_repr(self.targets)}")
        for name in ("alpha", "targets"):
            if not self.rank and getattr(self, name) != getattr(LoraConfig, name):
                raise UserError(f"lora.{name} needs lora.rank: add --lora.rank 8, or leave it out")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. The defaults are those of `jaxgpt.generate` and `jaxgpt sample`.

    Filters apply in the order of transformers: repetition penalty, n-grams, temperature, top-k, top-p, min-p. Numbers are
    converted to Python's `int` and `float`, so that equal parameters share a compiled program.
    """

    temperature: float = 0.8  # divide the logits by this; 0 always takes the most probable token (greedy)
    top_k: int = 0  # keep the k most probable tokens; 0 disables
    top_p: float = 1.0  # keep the smallest set of tokens with total probability >= p; 1 disables
    min_p: float = 0.0  # drop tokens below min_p x the top probability; 0 disables
    # divide positive (multiply negative) logits of tokens in the text by this; 1 disables
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0  # forbid a second occurrence of any n-gram of this size; 0 disables

    def __post_init__(self) -> None:
        inf = math.inf
        values = {
            "temperature": as_float("temperature", self.temperature, 0, inf, open_end=True),
            "top_k": as_int("top-k", self.top_k, 0, 2**31 - 1),
            "top_p": as_float("top-p", self.top_p, 0, 1),
            "min_p": as_float("min-p", self.min_p, 0, 1),
            "repetition_penalty": as_float(
                "repetition-penalty", self.repetition_penalty, 0, inf, open_start=True, open_end=True
            ),
            "no_repeat_ngram_size": as_int("no-repeat-ngram-size", self.no_repeat_ngram_size, 0, MAX_TOKENS),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled at random."""
        return self.temperature > 0


@dataclass(frozen=True)
class BeamParams:
    """Parameters of beam search."""

    num_beams: int = 1  # number of beams; 1: sampling; above 1: beam search, which is deterministic
    num_return_sequences: int = 1  # texts to return per prompt: samples, or the best beams
    length_penalty: float = 1.0  # rank beams by log p / length ** length_penalty; above 0 favors longer texts
    # stop beam search at num_beams finished texts (true), or when a better text is unlikely (false) or impossible (never)
    early_stopping: bool | Literal["true", "false", "never"] = False

    def __post_init__(self) -> None:
        values = {
            "num_beams": as_int("num-beams", self.num_beams, 1, MAX_ROWS),
            "num_return_sequences": as_int("num-return-sequences", self.num_return_sequences, 1, MAX_ROWS),
            "length_penalty": as_float(
                "length-penalty", self.length_penalty, -math.inf, math.inf, open_start=True, open_end=True
            ),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.num_beams > 1 and self.num_return_sequences > self.num_beams:
            raise UserError(
                f"num-return-sequences {self.num_return_sequences} exceeds num-beams {self.num_beams}: "
                f"raise num-beams, or lower num-return-sequences"
            )
        stopping = {"true": True, "false": False}.get(str(self.early_stopping).lower(), self.early_stopping)
        if not (isinstance(stopping, bool) or stopping == "never"):
            raise UserError(f"early-stopping must be true, false or never: {short_repr(stopping)}")
        object.__setattr__(self, "early_stopping", stopping)


def settings_of(cls: type[T], source: Any) -> T:
    """Build a `cls` from the attributes of `source` with the same names, such as parsed flags."""
    return cls(**{f.name: getattr(source, f.name) for f in fields(cls)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Processes of a distributed run. Not saved in config.json: a run can resume with another number of processes."""

    coordinator: str = ""  # HOST:PORT of process 0, auto, or none; empty: auto under Slurm, MPI and GKE, else none
    num_processes: int = 0  # number of processes, if the coordinator is HOST:PORT
    process_id: int = -1  # index of this process, from 0
    bind: str = ""  # ADDRESS:PORT process 0 listens on; empty: the coordinator's (auto: its port on all addresses)
    join_seconds: int = 300  # seconds to wait for the other processes at startup
    heartbeat_seconds: int = 30  # abort if a process is silent for this many seconds
    launched: bool = False  # set by `jaxgpt launch`: save and stop when standard input closes

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
        for name in ("coordinator", "bind"):
            host, _, port = getattr(self, name).rpartition(":")
            if getattr(self, name) and not (host and port.isdecimal() and 0 < int(port) < 2**16):
                raise UserError(
                    f"distributed.{name} must be HOST:PORT, auto or none, not {short_repr(getattr(self, name))}"
                )
        _bounds("distributed", self, "num_processes", 1, 2**20)
        _bounds("distributed", self, "process_id", 0, self.num_processes - 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run, saved as `config.json` in the run directory."""

    preset: str = ""  # preset the run was started from
    init_from: str = ""  # checkpoint of the initial weights: RUN/checkpoints/STEP (empty: random weights)
    model: ModelConfig = field(default_factory=ModelConfig)  # the model
    data: DataConfig = field(default_factory=DataConfig)  # data
    optim: OptimConfig = field(default_factory=OptimConfig)  # optimizer
    train: TrainConfig = field(default_factory=TrainConfig)  # training
    mesh: MeshConfig = field(default_factory=MeshConfig)  # device mesh
    lora: LoraConfig = field(default_factory=LoraConfig)  # low-rank adapters

    def __post_init__(self) -> None:
        _types(self, "config")
        if self.train.scan_layers and len(set(self.model.windows)) > 1:
            raise UserError(
                f"train.scan_layers needs the same sliding window in all layers, but model.window_pattern is "
                f"{self.model.window_pattern}: set train.scan_layers to false"
            )
        if self.lora.rank and self.optim.name == "muon":
            raise UserError("optim.name muon does not support adapters (lora.rank): use --optim.name adamw")
        train, several = self.train, self.train.steps_per_call > 1
        calls = f"train.steps_per_call {train.steps_per_call} x " if several else ""
        windows = train.steps_per_call * train.batch_size
        self._check_batch(windows, f"{calls}train.batch_size {train.batch_size}", "call" if several else "step")
        self._check_batch(train.eval_batch_size, f"train.eval_batch_size {train.eval_batch_size}", "batch")

    def _check_batch(self, windows: int, settings: str, unit: str) -> None:
        ids = windows * (self.model.block_size + 1)
        if ids > MAX_BATCH:
            raise UserError(
                f"{settings} x (model.block_size {self.model.block_size} + 1) is {ids:,} token ids: "
                f"at most {MAX_BATCH:,} are allowed per {unit}"
            )

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate schedule ends."""
        return self.optim.decay_steps or self.train.steps

    def with_model(self, **changes: Any) -> Config:
        """Replace settings of the model."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, **changes))


def to_json(config: Any) -> str:
    """Convert a config to indented JSON, with keys in field order."""
    return json.dumps(dataclasses.asdict(config), indent=2, allow_nan=False) + "\n"


def flat(config: Any) -> dict[str, Any]:
    """Flatten a config to `{"model.n_layer": 6, ...}`."""
    names = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    sections = {name: flat(value) for name, value in names.items() if dataclasses.is_dataclass(value)}
    nested = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in names.items() if name not in sections} | nested


def from_json(text: bytes | str, where: str = "config.json") -> Config:
    """Parse a `Config`. Missing keys take their defaults; unknown keys are errors.

    Settings of earlier versions are converted.

    Raises:
        UserError: not JSON, not an object, an unknown key or an invalid value.
    """
    try:
        config: Config = _build(Config, _updated(parse_json(text, where), where), where)
    except UserError as e:
        raise e if str(e).startswith(where) else UserError(f"{where}: {e}") from None
    return config


def _updated(data: Any, where: str) -> Any:
    """Convert `train.accumulation` of earlier versions, a number of microbatches, to `train.microbatch`."""
    train = data.get("train") if isinstance(data, dict) else None
    if not isinstance(train, dict) or "accumulation" not in train or "microbatch" in train:
        return data
    train = dict(train)
    count = train.pop("accumulation")
    if type(count) is not int or count < 1:
        raise UserError(f"{where}: train.accumulation must be an integer of at least 1, not {short_repr(count)}")
    return data | {"train": train | {"microbatch": -count}}


def _build(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: expected an object, found {type(data).__name__}")
    names = [f.name for f in fields(cls)]
    hints = get_type_hints(cls)
    for key in data:
        if key not in names:
            raise UserError(f"{where}: unknown key {short_repr(key)}{did_you_mean(key, names)}")
    values = {}
    for key, value in data.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            value = _build(hint, value, f"{where}: {key}")  # type: ignore[arg-type]
        elif hint is float and type(value) is int:
            value = float(value)  # JSON does not distinguish 1 from 1.0
        elif get_origin(hint) is tuple and isinstance(value, list):
            value = tuple(value)
        values[key] = value
    return cls(**values)


def _types(config: Any, section: str) -> None:
    """Check that every value has the type of its field. A bool is not accepted as an int; an int is accepted as a float."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                known = ", ".join(str(a) for a in get_args(hint))
                near = did_you_mean(value, get_args(hint)) if isinstance(value, str) else ""
                raise UserError(f"{section}.{name} must be one of {known}, not {short_repr(value)}{near}")
        elif hint is float:
            # A comparison, because math.isfinite fails for huge integers; NaN fails the comparison.
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
                raise UserError(f"{section}.{name} must be a finite number, not {short_repr(value)}")
        elif hint == tuple[str, ...]:
            if not isinstance(value, tuple) or not all(isinstance(word, str) and _is_text(word) for word in value):
                raise UserError(f"{section}.{name} must be a list of strings, not {short_repr(value)}")
        elif type(value) is not hint:
            raise UserError(f"{section}.{name} must be of type {hint.__name__}, not {short_repr(value)}")
        elif isinstance(value, str) and not _is_text(value):
            raise UserError(f"{section}.{name} {short_repr(value)} contains a NUL or an unpaired surrogate")


def _is_text(value: str) -> bool:
    """Return whether a string has no NUL and no lone surrogate (which marks a byte of an argument that is not UTF-8)."""
    return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)


def _bounds(
    section: str, config: Any, name: str, low: float, high: float, *, open_start: bool = False, open_end: bool = False
) -> None:
    value = getattr(config, name)
    if value < low or value > high or (open_start and value == low) or (open_end and value == high):
        start = f"{'above' if open_start else 'at least'} {_plain(low)}"
        end = f"{'below' if open_end else 'at most'} {_plain(high)}"
        # Mention a large upper limit only if it is exceeded: it is far from any sensible value.
        limits = start if value <= low and high >= 1e6 else f"{start} and {end}"
        raise UserError(f"{section}.{name} must be {limits}, not {short_repr(value)}")


def _plain(limit: float) -> str:
    """Format an integer with all digits, a float in short form."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"
