"""GPT-2 family: tensors and options of transformers and nanoGPT.

Queries, keys and values are concatenated in `c_attn`. GPT-2's Conv1D stores W as `[in, out]`, nanoGPT's torch.nn.Linear
as `[out, in]`.
"""

from __future__ import annotations

from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.family import Family
from jaxgpt.convert.files import Weights
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensors import HEAD, Format, WeightRow, WeightTable, matrix, norm

PREFIX = "transformer."
COMPILED = "_orig_mod."  # prefix that torch.compile adds to names
DROPOUTS = ("embd_pdrop", "attn_pdrop")  # dropout options besides resid_pdrop
OPTIONS: dict[str, tuple[str, Any]] = {  # option: (setting, default of GPT2Config)
    "vocab_size": ("vocab_size", 50257),
    "n_positions": ("block_size", 1024),
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "n_inner": ("n_inner", 0),
    "activation_function": ("activation", "gelu_new"),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "tie_word_embeddings": ("tie_embeddings", True),
    "scale_attn_weights": ("scale_attn_weights", True),
    "scale_attn_by_inverse_layer_idx": ("scale_attn_by_inverse_layer_idx", False),
    "resid_pdrop": ("dropout", 0.1),
}


def _table(output_first: bool) -> WeightTable:
    """Return the names and layouts of the tensors; `output_first`: whether matrices are stored as `[out, in]`."""
    layer = f"{PREFIX}h.{{}}."
    stored = {"output_first": output_first}
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
        WeightRow(HEAD, ("lm_head/kernel",), output_first=True),
    )


def _read(options: Options, config: ModelConfig) -> dict[str, Any]:
    """Check that all dropout options are equal."""
    for name in DROPOUTS:
        options.only(name, config.dropout)
    return {}


FAMILY = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    form=Format(_table(output_first=False), PREFIX, f"{PREFIX}wte.weight"),
    options=OPTIONS,
    settings={},
    only={"normalize_attention_scores": True},
    fills={"bias": True, "norm_affine": True},
    read=_read,
    write=lambda config: dict.fromkeys(DROPOUTS, config.dropout),
    vllm_activations=("gelu", "gelu_new"),
)

NANOGPT = Format(_table(output_first=True), PREFIX, f"{PREFIX}wte.weight")


def read_nanogpt(options: Options, weights: Weights) -> ModelConfig:
    """Return the config of a nanoGPT checkpoint, from config.json and the shapes of its tensors."""
    shapes = {name.removeprefix(COMPILED): tensor.shape for name, tensor in weights.tensors.items()}
    has_bias = f"{PREFIX}h.0.attn.c_attn.bias" in shapes
    vocab_size = options.read("vocab_size", 0)
    if not vocab_size and shapes.get(NANOGPT.tied):
        vocab_size = shapes[NANOGPT.tied][0]  # rows of the embedding table
    return ModelConfig(
        n_layer=options.read("n_layer", int),
        n_head=options.read("n_head", int),
        n_embd=options.read("n_embd", int),
        block_size=options.read("block_size", int),
        vocab_size=vocab_size,
        bias=options.read("bias", has_bias),
        dropout=options.read("dropout", 0.0),
        activation="gelu",
    )
