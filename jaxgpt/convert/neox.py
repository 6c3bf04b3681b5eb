"""transformers GPT-NeoX and Pythia. In `query_key_value`, the rows of each head's query, key and value are adjacent."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert import gpt2
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import ACTIVATIONS, Options
from jaxgpt.convert.tensors import WeightRow, matrix, norm
from jaxgpt.convert.weights import Format

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
SCORES: dict[str, Any] = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


def _from_hf(options: Options) -> ModelConfig:
    """Convert a config.json, with the defaults of GPTNeoXConfig."""
    o = options
    dropout = o.number("hidden_dropout", 0.0)
    o.expect("attention_dropout", dropout)
    o.skip("classifier_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
    o.only("attention_bias", True)
    return ModelConfig(
        vocab_size=o.integer("vocab_size", 50432),
        block_size=o.integer("max_position_embeddings", 2048),
        n_layer=o.integer("num_hidden_layers", 44),
        n_head=o.integer("num_attention_heads", 64),
        n_embd=o.integer("hidden_size", 6144),
        n_inner=o.integer("intermediate_size", 24576),
        positions="rope",
        **_rope(o),
        activation=o.choice("hidden_act", ACTIVATIONS, "gelu"),  # type: ignore[arg-type]
        norm_eps=o.number("layer_norm_eps", 1e-5),
        parallel_residual=o.flag("use_parallel_residual", True),
        tie_embeddings=o.flag("tie_word_embeddings", False),
        dropout=dropout,
    )


def _rope(o: Options) -> dict[str, Any]:
    """Read the rotary settings: `rope_parameters` in transformers 5, `rotary_emb_base` and `rotary_pct` in 4."""
    o.only("rope_scaling", None)
    theta, fraction = o.number("rotary_emb_base", 10_000.0), o.number("rotary_pct", 0.25)
    o.only("rope_theta", theta)  # transformers 4 may write the same values again, under these names
    o.only("partial_rotary_factor", fraction)
    inner = o.inner("rope_parameters", o.object("rope_parameters"))
    inner.only("rope_type", "default")
    inner.skip("original_max_position_embeddings")
    theta, fraction = inner.number("rope_theta", theta), inner.number("partial_rotary_factor", fraction)
    inner.done()
    return {"rope_theta": theta, "rope_fraction": fraction}


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "hidden_act": config.activation,
        "max_position_embeddings": config.block_size,
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": True,
        "hidden_dropout": config.dropout,
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
    config_from_hf=_from_hf,
    adapt=partial(gpt2.adapt_to, family="gpt_neox", positions="rope", rope_factor=1.0, **SCORES),
    to_hf=_to_hf,
    served=gpt2.FAMILY.served,
)
