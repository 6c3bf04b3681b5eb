"""Llama and Qwen3 of transformers: `LlamaForCausalLM`, `Qwen3ForCausalLM`. torch.nn.Linear stores W as (out, in)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxgpt.config import ModelConfig, UserError
from jaxgpt.convert.options import ACTIVATIONS, Options, require
from jaxgpt.convert.tensors import Table, Tensor
from jaxgpt.errors import shown

PREFIX = "model."


def _linear(name: str, leaf: str, n_in: int = 1) -> tuple[Tensor, Tensor]:
    return (
        Tensor(f"{PREFIX}layers.{{}}.{name}.weight", (f"h_{{}}/{leaf}/kernel",), n_in, output_first=True),
        Tensor(f"{PREFIX}layers.{{}}.{name}.bias", (f"h_{{}}/{leaf}/bias",)),
    )


def _norm(name: str, leaf: str) -> Tensor:
    return Tensor(f"{PREFIX}layers.{{}}.{name}.weight", (f"h_{{}}/{leaf}/scale",))


TABLE: Table = (
    Tensor(f"{PREFIX}embed_tokens.weight", ("wte/embedding",), 1),
    _norm("input_layernorm", "ln_1"),
    *_linear("self_attn.q_proj", "attn/q_proj"),
    *_linear("self_attn.k_proj", "attn/k_proj"),
    *_linear("self_attn.v_proj", "attn/v_proj"),
    *_linear("self_attn.o_proj", "attn/o_proj", n_in=2),
    _norm("self_attn.q_norm", "attn/q_norm"),
    _norm("self_attn.k_norm", "attn/k_norm"),
    _norm("post_attention_layernorm", "ln_2"),
    *_linear("mlp.gate_proj", "mlp/gate_proj"),
    *_linear("mlp.up_proj", "mlp/up_proj"),
    *_linear("mlp.down_proj", "mlp/down_proj"),
    Tensor(f"{PREFIX}norm.weight", ("ln_f/scale",)),
    Tensor("lm_head.weight", ("lm_head/kernel",), 1, output_first=True),
)


def config_from_hf(options: Options, qwen3: bool) -> ModelConfig:
    """Convert a config.json. Defaults are those of LlamaConfig and Qwen3Config."""
    o = options
    n_embd, n_head = o.integer("hidden_size", 4096), o.integer("num_attention_heads", 32)
    block_size = o.integer("max_position_embeddings", 32768 if qwen3 else 2048)
    n_layer = o.integer("num_hidden_layers", 32)
    bias = o.flag("attention_bias", False)
    o.expect("attention_dropout", 0.0)
    if qwen3:
        if bias:
            raise o.refuse("attention_bias", True, "a model here has biases in all matrices or in none")
        window = _window(o, n_layer)
    else:
        window = 0
        o.expect("bias", False)
        o.skip("max_sequence_length")
        if o.flag("mlp_bias", False) != bias:
            raise o.refuse("mlp_bias", not bias, f"it must equal attention_bias, {bias}")
    return ModelConfig(
        vocab_size=o.integer("vocab_size", 151936 if qwen3 else 32000),
        block_size=block_size,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=o.integer("num_key_value_heads", n_head),
        n_embd=n_embd,
        head_dim=o.integer("head_dim", 128 if qwen3 else n_embd // max(n_head, 1)),
        n_inner=o.integer("intermediate_size", 22016 if qwen3 else 11008),
        positions="rope",
        norm="rmsnorm",
        norm_eps=o.number("rms_norm_eps", 1e-6),
        qk_norm=qwen3,
        mlp="gated",
        activation=o.choice("hidden_act", ACTIVATIONS, "silu"),  # type: ignore[arg-type]
        bias=bias,
        tie_embeddings=o.flag("tie_word_embeddings", False),
        sliding_window=window,
        **_rope(o, block_size),
    )


def _window(o: Options, n_layer: int) -> int:
    """Return the sliding window of all layers, 0 for none. Qwen3 may give only some of them one, which is refused."""
    window, used, begin = o.take("sliding_window"), o.flag("use_sliding_window", False), o.take("max_window_layers")
    kinds = o.take("layer_types")
    if not used or window is None:
        window, begin = 0, n_layer
    begin = 28 if begin is None else begin
    if type(begin) is not int or type(window) is not int:
        raise o.refuse("max_window_layers, sliding_window", [begin, window], "both must be integers")
    # Counted, not spelled out: a file may claim any number of layers.
    full, sliding, layers = min(max(begin, 0), n_layer), n_layer - min(max(begin, 0), n_layer), n_layer
    if isinstance(kinds, list) and kinds:
        full, sliding, layers = kinds.count("full_attention"), kinds.count("sliding_attention"), len(kinds)
    elif kinds:
        raise o.refuse("layer_types", kinds, "it must be a list")
    if full == layers == n_layer:
        return 0
    if not (sliding == layers == n_layer and window):
        raise o.refuse("layer_types", kinds, "all layers must have the same kind of attention")
    return window


def _rope(o: Options, block_size: int) -> dict[str, Any]:
    """Read the rotary settings: `rope_parameters` in transformers 5, `rope_theta` and `rope_scaling` in 4; many have both."""
    theta, scaling, new = o.take("rope_theta"), o.take("rope_scaling"), o.take("rope_parameters")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise o.refuse(name, value, "it must be an object")
    rope = dict(new or scaling or {})
    if new and scaling and any(new.get(k) != v for k, v in scaling.items() if k != "type"):
        raise o.refuse("rope_scaling", scaling, f"it contradicts rope_parameters {shown(new)}")
    theta = rope.pop("rope_theta", theta if theta is not None else 10_000.0)
    inner = Options(rope, f"{o.where}: rope_parameters")
    legacy = inner.take("type")
    kind = inner.choice("rope_type", {"default": "default", "llama3": "llama3"}, legacy or "default")
    inner.only("partial_rotary_factor", 1.0)
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise o.refuse("rope_theta", theta, "it must be a number")
    settings: dict[str, Any] = {"rope_theta": float(theta)}
    if kind == "llama3":
        settings |= {
            "rope_factor": inner.number("factor"),
            "rope_low_freq_factor": inner.number("low_freq_factor"),
            "rope_high_freq_factor": inner.number("high_freq_factor"),
            "rope_original_context": inner.integer("original_max_position_embeddings", block_size),
        }
    inner.done()
    return settings


def adapt(config: ModelConfig) -> ModelConfig:
    """Return a config of the same function with the options of Llama, or of Qwen3 if it has QK-norm.

    A plain MLP with ReLU squared is a gated one whose gate is its own input: `relu(u)^2 = relu(u) u`.

    Raises:
        UserError: a setting that these do not have; it is named.
    """
    name = "qwen3" if config.qk_norm else "llama"
    if not config.tie_embeddings and config.head_bias:
        raise UserError(f"model.head_bias True has no {name} equivalent: its head has no bias")
    if config.mlp == "plain" and config.activation == "relu2" and not config.bias:
        config = replace(config, mlp="gated", activation="relu", n_inner=config.mlp_width)
    require(
        config,
        name,
        positions="rope",
        rope_local_theta=0.0,
        rope_fraction=1.0,
        norm="rmsnorm",
        norm_position="pre",
        final_norm=True,
        qk_norm_per_head=True,
        mlp="gated",
        parallel_residual=False,
        embed_scale=False,
        window_pattern="L",
        attn_proj=True,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        logit_softcap=0.0,
    )
    if not config.bias:
        require(config, name, qkv_bias=False)
    if config.qk_norm:
        require(config, name, bias=False)
    else:
        require(config, name, sliding_window=0)
        if config.n_embd % config.n_head:
            raise UserError(
                f"model.n_head {config.n_head} has no llama equivalent: it must divide model.n_embd {config.n_embd}"
            )
    # Llama has no residual dropout; the function of a trained model is the same.
    return replace(config, norm_affine=True, dropout=0.0)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Convert a config that `adapt` returned to a config.json."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_factor != 1.0:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_context,
        }
    values: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": config.activation,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.bias,
        "attention_dropout": 0.0,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # for transformers 4
        "use_cache": True,
    }
    if config.rope_factor != 1.0:
        values["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if not config.qk_norm:
        return values | {"mlp_bias": config.bias}
    windows = bool(config.sliding_window)
    return values | {
        "use_sliding_window": windows,
        "sliding_window": config.sliding_window or None,
        "max_window_layers": 0 if windows else config.n_layer,
        "layer_types": ["sliding_attention" if windows else "full_attention"] * config.n_layer,
    }
