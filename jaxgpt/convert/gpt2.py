"""transformers GPT-2: `GPT2LMHeadModel`. Its Conv1D stores W as `[in, out]`; q, k and v are concatenated in `c_attn`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import ACTIVATIONS, Options, require
from jaxgpt.convert.tensors import WeightRow, WeightTable, matrix, norm
from jaxgpt.convert.weights import Format
from jaxgpt.errors import UserError

PREFIX = "transformer."
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def _table(output_first: bool) -> WeightTable:
    layer, stored = f"{PREFIX}h.{{}}.", {"output_first": output_first}
    return (
        WeightRow(f"{PREFIX}wte.weight", ("wte/embedding",)),
        WeightRow(f"{PREFIX}wpe.weight", ("wpe/embedding",)),
        *norm(f"{layer}ln_1", "h_{}/ln_1"),
        *matrix(f"{layer}attn.c_attn", "attn/q_proj", "attn/k_proj", "attn/v_proj", **stored),
        *matrix(f"{layer}attn.c_proj", "attn/o_proj", **stored),
        *norm(f"{layer}ln_2", "h_{}/ln_2"),
        *matrix(f"{layer}mlp.c_fc", "mlp/up_proj", **stored),
        *matrix(f"{layer}mlp.c_proj", "mlp/down_proj", **stored),
        *norm(f"{PREFIX}ln_f", "ln_f"),
        WeightRow("lm_head.weight", ("lm_head/kernel",), output_first=True),
    )


TABLE = _table(output_first=False)
NANOGPT_TABLE = _table(output_first=True)  # the same names with torch.nn.Linear


def _from_hf(options: Options) -> ModelConfig:
    """Convert a config.json, with the defaults of GPT2Config."""
    o = options
    dropout = o.number("resid_pdrop", 0.1)
    for name in ("embd_pdrop", "attn_pdrop"):
        o.expect(name, dropout)
    # They select the precision and the order in which scores are computed: here always float32, scaled once.
    o.skip("reorder_and_upcast_attn", "apply_query_key_layer_scaling")
    o.only("normalize_attention_scores", True)
    o.skip(
        "n_ctx",
        "n_special",
        "predict_special_tokens",
        *(f"summary_{x}" for x in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
    )
    return ModelConfig(
        vocab_size=o.integer("vocab_size", 50257),
        block_size=o.integer("n_positions", 1024),
        n_layer=o.integer("n_layer", 12),
        n_head=o.integer("n_head", 12),
        n_embd=o.integer("n_embd", 768),
        n_inner=o.integer("n_inner", 0),
        activation=o.choice("activation_function", ACTIVATIONS, "gelu_new"),  # type: ignore[arg-type]
        norm_eps=o.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=o.flag("tie_word_embeddings", True),
        scale_attn_weights=o.flag("scale_attn_weights", True),
        scale_attn_by_inverse_layer_idx=o.flag("scale_attn_by_inverse_layer_idx", False),
        dropout=dropout,
    )


def adapt_to(config: ModelConfig, family: str, **needed: Any) -> ModelConfig:
    """Return a config of the same function with the options that GPT-2 and GPT-NeoX share, and all biases.

    Raises:
        UserError: if a setting has no equivalent in the family.
    """
    if config.n_head * config.head_width != config.n_embd:
        raise UserError(
            f"model.head_dim {config.head_dim} has no {family} equivalent: n_head * head_dim must equal n_embd "
            f"{config.n_embd}"
        )
    require(
        config,
        family,
        norm="layernorm",
        norm_position="pre",
        final_norm=True,
        qk_norm=False,
        mlp="plain",
        attn_proj=True,
        embed_scale=False,
        kv_heads=config.n_head,
        logit_softcap=0.0,
        sliding_window=0,
        **needed,
    )
    return replace(config, bias=True, norm_affine=True, n_kv_head=0, head_dim=0)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_positions": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.n_inner or None,
        "activation_function": config.activation,
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "reorder_and_upcast_attn": False,
    } | dict.fromkeys(_DROPOUTS, config.dropout)


FAMILY = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    form=Format(TABLE, PREFIX, f"{PREFIX}wte.weight"),
    config_from_hf=_from_hf,
    adapt=partial(adapt_to, family="gpt2", positions="learned", parallel_residual=False),
    to_hf=_to_hf,
    served=("gelu", "gelu_new"),  # llama.cpp computes both by the tanh approximation
)
