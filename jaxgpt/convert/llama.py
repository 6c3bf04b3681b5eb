"""transformers Llama, and the code shared by the families with Llama's names of options and tensors.

torch.nn.Linear stores W as `[out, in]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxgpt.config import MAX_LAYERS, ModelConfig
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import ACTIVATIONS, Options, require
from jaxgpt.convert.tensors import WeightRow, WeightTable, matrix, norm
from jaxgpt.convert.weights import HEAD, Format
from jaxgpt.errors import UserError, short_repr

PREFIX = "model."
LAYER_LETTERS = {
    "full_attention": "G",
    "sliding_attention": "L",
}  # layer types and their letters in model.window_pattern
DEFAULTS: dict[str, Any] = {  # LlamaConfig's
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# Settings that only some of these families have, and their values for Llama.
PLAIN: dict[str, Any] = {
    "norm_position": "pre",
    "bias": False,
    "qkv_bias": False,
    "qk_norm": False,
    "qk_norm_per_head": True,
    "embed_scale": False,
    "logit_softcap": 0.0,
    "sliding_window": 0,
    "window_pattern": "L",
    "rope_local_theta": 0.0,
}


def make_table(norms: Mapping[str, str], offset: float = 0.0, q_gain: float = 1.0) -> WeightTable:
    """Return the table of a family.

    Args:
        norms: the norms of a layer, from their names in transformers to those of their parameters.
        offset: added to a stored gain: 1 if gains are stored as differences from 1.
        q_gain: factor of the gain of the norm of queries.
    """
    layer = f"{PREFIX}layers.{{}}."
    return (
        WeightRow(f"{PREFIX}embed_tokens.weight", ("wte/embedding",)),
        *(row for name, leaf in norms.items() for row in norm(f"{layer}{name}", f"h_{{}}/{leaf}", offset)),
        *(row for x in "qkvo" for row in matrix(f"{layer}self_attn.{x}_proj", f"attn/{x}_proj")),
        *norm(f"{layer}self_attn.q_norm", "h_{}/attn/q_norm", offset, q_gain),
        *norm(f"{layer}self_attn.k_norm", "h_{}/attn/k_norm", offset),
        *(row for x in ("gate", "up", "down") for row in matrix(f"{layer}mlp.{x}_proj", f"mlp/{x}_proj")),
        *norm(f"{PREFIX}norm", "ln_f", offset),
        WeightRow(HEAD, ("lm_head/kernel",), output_first=True),
    )


def make_format(table: WeightTable) -> Format:
    """Return the names of the tensors of a family."""
    return Format(table, PREFIX, f"{PREFIX}embed_tokens.weight")


FORM = make_format(make_table({"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}))


def _from_hf(options: Options) -> ModelConfig:
    o = options
    bias = o.flag("attention_bias", False)
    o.expect("bias", False)
    o.skip("max_sequence_length")
    if o.flag("mlp_bias", False) != bias:
        raise o.refuse("mlp_bias", not bias, f"it must equal attention_bias, {bias}")
    return read_config(o, DEFAULTS, bias=bias)


def read_rope(options: Options, block_size: int) -> dict[str, Any]:
    """Read the rotary settings: `rope_parameters` in transformers 5, `rope_theta` and `rope_scaling` in 4; many have both."""
    o = options
    theta, scaling, new = o.take("rope_theta"), o.object("rope_scaling"), o.object("rope_parameters")
    if new and scaling and any(new.get(k) != v for k, v in scaling.items() if k != "type"):
        raise o.refuse("rope_scaling", scaling, f"it contradicts rope_parameters {short_repr(new)}")
    rope = dict(new or scaling)
    rope.setdefault("rope_theta", 10_000.0 if theta is None else theta)
    return rope_settings(o, rope, block_size)


def read_config(
    options: Options,
    defaults: Mapping[str, Any],
    activation: str = "hidden_act",
    rope: Callable[[Options, int], dict[str, Any]] = read_rope,
    windows: Callable[[Options, int], dict[str, Any]] = lambda options, n_layer: {},
    **settings: Any,
) -> ModelConfig:
    """Convert the options that the families share.

    Args:
        options: the options of a config.json.
        defaults: defaults of the family's config class in transformers.
        activation: the name of the option for the activation.
        rope: reads the rotary settings, given the context length.
        windows: reads the settings of the sliding window, given the number of layers.
        settings: other settings of the model.
    """
    o = options
    o.expect("attention_dropout", 0.0)

    def integer(name: str) -> int:
        return o.integer(name, defaults[name])

    n_embd, n_head, n_layer = integer("hidden_size"), integer("num_attention_heads"), integer("num_hidden_layers")
    block_size = integer("max_position_embeddings")
    key_heads = n_head if o.is_null("num_key_value_heads") else defaults.get("num_key_value_heads", n_head)
    shared: dict[str, Any] = {
        "vocab_size": integer("vocab_size"),
        "block_size": block_size,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": o.integer("num_key_value_heads", key_heads),
        "n_embd": n_embd,
        "head_dim": o.integer("head_dim", defaults.get("head_dim", n_embd // max(n_head, 1))),
        "n_inner": integer("intermediate_size"),
        "positions": "rope",
        "norm": "rmsnorm",
        "norm_eps": o.number("rms_norm_eps", defaults["rms_norm_eps"]),
        "mlp": "gated",
        "activation": o.choice(activation, ACTIVATIONS, defaults.get(activation, "silu")),
        "bias": False,
        "tie_embeddings": o.flag("tie_word_embeddings", defaults["tie_word_embeddings"]),
    }
    shared |= rope(o, block_size) | windows(o, n_layer) | settings
    if not shared.get("sliding_window"):
        shared.pop("rope_local_theta", None)  # there are no local layers
    return ModelConfig(**shared)


def read_windows(options: Options, n_layer: int, window: Any, pattern: str) -> dict[str, Any]:
    """Return the settings of the sliding window from `layer_types`, or from a pattern as in `model.window_pattern`."""
    kinds = options.take("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != n_layer or any(kind not in [*LAYER_LETTERS] for kind in kinds):
            raise options.refuse(
                "layer_types", kinds, f"it must list {n_layer} layers, each one of {', '.join(LAYER_LETTERS)}"
            )
        pattern = "".join(LAYER_LETTERS[kind] for kind in kinds)
    # ModelConfig rejects too many layers.
    layers = [pattern[i % len(pattern)] for i in range(min(n_layer, MAX_LAYERS))]
    if "L" not in layers:
        return {}
    if type(window) is not int or window < 1:
        raise options.refuse("sliding_window", window, "layers of type sliding_attention need one of at least 1")
    period = next(p for p in range(1, len(layers) + 1) if layers[p:] == layers[:-p])
    return {"sliding_window": window, "window_pattern": "".join(layers[:period])}


def rope_settings(options: Options, rope: dict[str, Any], block_size: int) -> dict[str, Any]:
    """Convert the rotary settings of one kind of layers."""
    inner = options.inner("rope_parameters", rope)
    older_name = inner.take("type")
    kind = inner.choice("rope_type", {name: name for name in ("default", "linear", "llama3")}, older_name or "default")
    inner.only("partial_rotary_factor", 1.0)
    settings: dict[str, Any] = {"rope_theta": inner.number("rope_theta")}
    if kind == "linear":  # stretch all wavelengths: even the shortest, 2 pi, is above context / low = 1
        settings |= {
            "rope_factor": inner.number("factor"),
            "rope_low_freq_factor": float(block_size),
            "rope_high_freq_factor": 2.0 * block_size,
            "rope_original_context": block_size,
        }
    if kind == "llama3":
        settings |= {
            "rope_factor": inner.number("factor"),
            "rope_low_freq_factor": inner.number("low_freq_factor"),
            "rope_high_freq_factor": inner.number("high_freq_factor"),
            "rope_original_context": inner.integer("original_max_position_embeddings", block_size),
        }
    else:
        inner.skip("original_max_position_embeddings")  # the other kinds do not read it
    inner.done()
    return settings


def adapt_to(
    config: ModelConfig, family: str, free: Collection[str] = (), adds: Collection[str] = (), **fixed: Any
) -> ModelConfig:
    """Return a config of the same function with the options of a family.

    A plain MLP with ReLU squared is a gated one with its own input as the gate: `relu(u)^2 = relu(u) u`.

    Args:
        config: the model.
        family: its name, for errors.
        free: settings of `PLAIN` that may have any value.
        adds: biases that become zeros if the model lacks them.
        fixed: settings with values that replace those in `PLAIN`.

    Raises:
        UserError: if a setting has no equivalent in the family.
    """
    if config.n_embd % config.n_head:
        raise UserError(
            f"model.n_head {config.n_head} has no {family} equivalent: it must divide model.n_embd {config.n_embd}"
        )
    if config.mlp == "plain" and config.activation == "relu2" and not config.bias:
        config = replace(config, mlp="gated", activation="relu", n_inner=config.mlp_width)
    if config.bias:
        config = replace(config, qkv_bias=False)  # implied
    if not config.qk_norm:
        config = replace(config, qk_norm_per_head=True)  # without effect
    require(
        config,
        family,
        positions="rope",
        rope_fraction=1.0,
        norm="rmsnorm",
        final_norm=True,
        mlp="gated",
        parallel_residual=False,
        attn_proj=True,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        **{name: value for name, value in (PLAIN | fixed).items() if name not in (*free, *adds)},
    )
    # These families have no residual dropout; the function of a trained model is the same.
    added: dict[str, Any] = dict.fromkeys(adds, True)
    return replace(config, norm_affine=True, dropout=0.0, **added)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Convert the settings that the families share."""
    rope = write_rope(config)
    values: dict[str, Any] = {
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "hidden_act": config.activation,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # for transformers 4
    }
    if config.head_width * config.n_head != config.n_embd:
        values["head_dim"] = config.head_width
    if config.rope_factor != 1.0:
        values["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return values


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Convert the rotary settings to `rope_parameters`; in Gemma 3, to those of the global layers."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_factor == 1.0:
        return rope
    if config.rope_low_freq_factor >= config.rope_original_context / (2 * math.pi):
        return rope | {"rope_type": "linear", "factor": config.rope_factor}
    return rope | {
        "rope_type": "llama3",
        "factor": config.rope_factor,
        "low_freq_factor": config.rope_low_freq_factor,
        "high_freq_factor": config.rope_high_freq_factor,
        "original_max_position_embeddings": config.rope_original_context,
    }


def layer_types(config: ModelConfig) -> list[str]:
    """Return the kind of attention of each layer, as transformers names it."""
    return ["sliding_attention" if window else "full_attention" for window in config.windows]


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return write_config(config) | {
        "head_dim": config.head_width,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
    }


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    form=FORM,
    config_from_hf=_from_hf,
    adapt=partial(adapt_to, family="llama", free=("bias",)),
    to_hf=_to_hf,
)
