"""Mixtral, Qwen3-MoE and OLMoE: families with experts, as differences from Mistral and Llama.

Every layer must have experts. The load-balancing loss affects only training, so its factor (`router_aux_loss_coef`) and its
switch (`output_router_logits`) are not read.
"""

from __future__ import annotations

from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert import llama
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import Options
from jaxgpt.convert.rope import read_rope, write_rope

OF_TRAINING = ("router_aux_loss_coef", "output_router_logits")


def _read_mixtral(options: Options, config: ModelConfig) -> dict[str, Any]:
    """Read RoPE, and check the number of experts."""
    options.skip(*OF_TRAINING)
    if config.n_experts < 1:
        raise options.refuse("num_local_experts", config.n_experts, "it must be at least 1")
    return read_rope(options, config, theta=1e6)


# Map from the names of the router and of each expert's matrices in Mixtral to their names in jaxgpt.
MIXTRAL_MLP = {
    "block_sparse_moe.gate": "router",
    "block_sparse_moe.experts.{expert}.w1": "gate_proj",
    "block_sparse_moe.experts.{expert}.w3": "up_proj",
    "block_sparse_moe.experts.{expert}.w2": "down_proj",
}
MIXTRAL_OPTIONS = llama.changed_options(
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=4096 * 32,
    rms_norm_eps=1e-5,
) | {
    "sliding_window": ("sliding_window", 0),
    "num_local_experts": ("n_experts", 8),
    "num_experts_per_tok": ("experts_per_token", 2),
}
MIXTRAL = llama.MISTRAL._replace(
    name="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    form=llama.make_form(llama.NORMS, mlp=MIXTRAL_MLP),
    options=MIXTRAL_OPTIONS,
    only=llama.PLAIN_ATTENTION | {"router_jitter_noise": 0.0},
    read=_read_mixtral,
)


def _read_olmoe(options: Options, config: ModelConfig) -> dict[str, Any]:
    """Read RoPE, whether the scores of a token's experts are divided by their sum, and the number of experts."""
    options.skip(*OF_TRAINING)
    settings = read_rope(options, config)
    settings["router_normalize"] = options.read("norm_topk_prob", False)
    # transformers 5 writes the number of experts under Mixtral's name.
    settings["n_experts"] = options.read("num_local_experts", 0) or config.n_experts
    if settings["n_experts"] < 1:
        raise options.refuse("num_experts", settings["n_experts"], "it must be at least 1")
    return settings


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    """Return the options of RoPE and of the experts' scores."""
    return write_rope(config) | {"norm_topk_prob": config.router_normalize}


# Map from the names of the router and of each expert's matrices in OLMoE and Qwen3-MoE to their names in jaxgpt.
OLMOE_MLP = {
    "mlp.gate": "router",
    "mlp.experts.{expert}.gate_proj": "gate_proj",
    "mlp.experts.{expert}.up_proj": "up_proj",
    "mlp.experts.{expert}.down_proj": "down_proj",
}
OLMOE_OPTIONS = llama.changed_options(
    vocab_size=50304,
    hidden_size=2048,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=16,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
) | {
    "num_experts": ("n_experts", 64),
    "num_experts_per_tok": ("experts_per_token", 8),
}
OLMOE = llama.LLAMA._replace(
    name="olmoe",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    form=llama.make_form(llama.NORMS, mlp=OLMOE_MLP),
    options=OLMOE_OPTIONS,
    settings=llama.LLAMA.settings | {"qk_norm": True, "qk_norm_per_head": False},
    only=llama.PLAIN_ATTENTION | {"clip_qkv": None},
    read=_read_olmoe,
    write=_write_olmoe,
)


def _read_qwen(options: Options, config: ModelConfig) -> dict[str, Any]:
    """Read the same options as OLMoE.

    The width of layers without experts and the options of windows are skipped, because `only` excludes such layers and windows.
    """
    options.skip("intermediate_size", "sliding_window", "max_window_layers")
    return _read_olmoe(options, config)


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    """Return the same options as for OLMoE; the width of layers without experts has no effect."""
    return _write_olmoe(config) | {"intermediate_size": config.mlp_width}


QWEN_OPTIONS = llama.changed_options(
    "intermediate_size",  # the width of layers without experts
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=24,
    num_key_value_heads=4,
    max_position_embeddings=32768,
) | {
    "num_experts": ("n_experts", 128),
    "num_experts_per_tok": ("experts_per_token", 8),
    "moe_intermediate_size": ("n_inner", 768),
}
QWEN3_MOE = llama.LLAMA._replace(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    form=llama.make_form(llama.NORMS, mlp=OLMOE_MLP),
    options=QWEN_OPTIONS,
    settings=llama.LLAMA.settings | {"qk_norm": True},
    # Layers without experts would have other weights than their neighbors.
    only=llama.PLAIN_ATTENTION | {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    read=_read_qwen,
    write=_write_qwen,
)


def family_for(model: ModelConfig) -> Family:
    """Return the family closest to a model with experts."""
    if not model.qk_norm:
        return MIXTRAL
    return QWEN3_MOE if model.qk_norm_per_head else OLMOE
