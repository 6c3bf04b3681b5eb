"""Settings of the model: architecture, initialization and dropout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxgpt.errors import short_repr
from jaxgpt.settings import MAX_VOCAB, Section, setting

MAX_LAYERS = 1024  # maximum n_layer, to limit tracing time; published decoders: at most a few hundred
MAX_HEAD = 2**16  # maximum head_dim, to limit the RoPE frequencies allocated before weights are checked
MAX_PARAMETERS = 10**13  # maximum number of parameters, 40 TB in float32

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
    rope_scaling: Literal["llama3", "yarn"] = setting("llama3", "kind of RoPE scaling, if rope_factor is not 1")
    rope_low_freq_factor: float = setting(
        1.0, "Llama 3: scale wavelengths above rope_original_context / this", 1e-6, 1e12
    )
    rope_high_freq_factor: float = setting(
        4.0, "Llama 3: keep wavelengths below rope_original_context / this", 1e-6, 1e12
    )
    rope_beta_slow: float = setting(
        1.0, "YaRN: scale wavelengths with fewer turns than this in rope_original_context", 1e-6, 1e12
    )
    rope_beta_fast: float = setting(
        32.0, "YaRN: keep wavelengths with more turns than this in rope_original_context", 1e-6, 1e12
    )
    rope_attention_factor: float = setting(
        0.0, "YaRN: factor of queries and keys; 0: 1 + 0.1 ln(rope_factor)", 0.0, 1e6
    )
    rope_original_context: int = setting(8192, "scaling of RoPE: context length before scaling, in tokens", 1, 2**24)
    norm: NormName = setting("layernorm", "normalization layer; stdnorm divides by (std + eps)")
    norm_position: Literal["pre", "post", "output", "both"] = setting(
        "pre", "pre: inputs of sublayers; post: residual sums; output: outputs of sublayers; both: inputs and outputs"
    )
    norm_affine: bool = setting(True, "learn a gain in each norm and, with model.bias, a bias (not RMSNorm)")
    norm_eps: float = setting(
        1e-5, "epsilon added to the variance; rmsnorm: to the mean square; stdnorm: to the standard deviation", 0.0, 1e6
    )
    final_norm: bool = setting(True, "normalize after the last block")
    qk_norm: bool = setting(False, "RMSNorm on queries and keys, before RoPE")
    qk_norm_per_head: bool = setting(True, "qk_norm: normalize each head separately; false: across heads")
    mlp: Literal["plain", "gated", "none"] = setting("plain", "gated: act(x W_g) * (x W_u), as in SwiGLU")
    activation: ActivationName = setting("gelu_new", "MLP activation; gelu_new: tanh approximation of gelu")
    n_experts: int = setting(0, "E, number of experts; each computes some of the tokens; 0: one MLP", 0, 2**16)
    experts_per_token: int = setting(2, "A, number of experts that compute each token", 1, 2**16)
    shared_experts: int = setting(
        0, "number of experts that compute every token, as one MLP with this multiple of the width", 0, 2**16
    )
    router: Literal["softmax", "sigmoid"] = setting(
        "softmax", "function from the router's logits to scores of the experts"
    )
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
    sliding_window: int = setting(
        0, "maximum number of tokens that a token attends to, including itself; 0: no limit", 0
    )
    window_pattern: str = setting("L", "repeated pattern of layers, such as LLLLLG; L: sliding window, G: no window")
    dropout: float = setting(0.0, "dropout rate on embeddings, attention weights and sublayer outputs", 0.0, below=1.0)
    init: Literal["gpt2", "torch", "zero-proj"] = setting("gpt2", "zero-proj: gpt2, with residual projections at zero")
    init_std: float = setting(0.02, "standard deviation of the gpt2 initialization", 0.0, 1e6)

    def check(self) -> Iterator[str]:
        """Yield the errors of settings that conflict.

        Settings of an optional part have no effect while the part is off, such as `rope_theta` without RoPE, so that one
        setting turns the part on or off; the bounds of RoPE scaling are checked even then. These exceptions are errors,
        because the user expects a different architecture: a changed `window_pattern` or `rope_local_theta` without
        `sliding_window`, and yarn without `rope_factor`.
        """
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
            yield f"without model.attn_proj, n_head * head_dim must equal model.n_embd {self.n_embd}: omit head_dim"
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
        letters = (pattern[layer % len(pattern)] for layer in range(self.n_layer))
        return tuple(self.sliding_window if letter == "L" else 0 for letter in letters)

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
