"""GPT-NeoX and Pythia family.

In `query_key_value`, the rows of each head's query, key and value are adjacent.
"""

from __future__ import annotations

from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensors import Format, WeightRow, matrix, norm

PREFIX = "gpt_neox."
LAYER = f"{PREFIX}layers.{{}}."
TABLE = (
    WeightRow(f"{PREFIX}embed_in.weight", ("wte/embedding",)),
    *norm(f"{LAYER}input_layernorm", "h_{}/ln_1"),
    *norm(f"{LAYER}post_attention_layernorm", "h_{}/ln_2"),
    *matrix(f"{LAYER}attention.query_key_value", "attn/q_proj", "attn/k_proj", "attn/v_proj", by_head=True),
    *matrix(f"{LAYER}attention.dense", "attn/o_proj"),
    *matrix(f"{LAYER}mlp.dense_h_to_4h", "mlp/up_proj"),
    *matrix(f"{LAYER}mlp.dense_4h_to_h", "mlp/down_proj"),
    *norm(f"{PREFIX}final_layer_norm", "ln_f"),
    WeightRow("embed_out.weight", ("lm_head/kernel",), output_first=True),
)
OPTIONS: dict[str, tuple[str, Any]] = {  # option: (setting, default of GPTNeoXConfig)
    "vocab_size": ("vocab_size", 50432),
    "max_position_embeddings": ("block_size", 2048),
    "num_hidden_layers": ("n_layer", 44),
    "num_attention_heads": ("n_head", 64),
    "hidden_size": ("n_embd", 6144),
    "intermediate_size": ("n_inner", 24576),
    "hidden_act": ("activation", "gelu"),
    "layer_norm_eps": ("norm_eps", 1e-5),
    "use_parallel_residual": ("parallel_residual", True),
    "tie_word_embeddings": ("tie_embeddings", False),
    "hidden_dropout": ("dropout", 0.0),
}


def _read(options: Options, config: ModelConfig) -> dict[str, Any]:
    """Check dropout, and read the RoPE settings from `rope_parameters` or the options of transformers 4."""
    options.only("attention_dropout", config.dropout)
    old = {
        "rope_theta": options.read("rotary_emb_base", 10_000.0),
        "partial_rotary_factor": options.read("rotary_pct", 0.25),
    }
    # transformers 4 may also write these values under the new names, outside rope_parameters.
    for name, value in old.items():
        options.only(name, value)

    new = options.read("rope_parameters", {})
    rope = options.inner("rope_parameters", old | new)
    rope.only("rope_type", "default")
    rope.skip("original_max_position_embeddings")
    settings = {
        "rope_theta": rope.read("rope_theta", float),
        "rope_fraction": rope.read("partial_rotary_factor", float),
    }
    rope.done()
    return settings


def _write(config: ModelConfig) -> dict[str, Any]:
    """Return the options of RoPE and attention dropout."""
    return {
        "attention_dropout": config.dropout,
        "rope_parameters": {
            "rope_theta": config.rope_theta,
            "rope_type": "default",
            "partial_rotary_factor": config.rope_fraction,
        },
        "rotary_emb_base": config.rope_theta,  # for transformers 4
        "rotary_pct": config.rope_fraction,
    }


FAMILY = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    form=Format(TABLE, PREFIX, f"{PREFIX}embed_in.weight", "embed_out.weight"),
    options=OPTIONS,
    settings={"positions": "rope"},
    only={"attention_bias": True, "rope_scaling": None},
    fills={"bias": True, "norm_affine": True},
    read=_read,
    write=_write,
    vllm_activations=("gelu", "gelu_new"),
)
