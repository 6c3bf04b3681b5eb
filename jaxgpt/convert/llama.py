"""Llama, Mistral, Qwen 2 and 3, and OLMo 2 families, which share most names of tensors and options.

torch.nn.Linear stores W as `[out, in]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import Options
from jaxgpt.convert.rope import read_rope, write_rope
from jaxgpt.convert.tensors import HEAD, Format, WeightRow, matrix, norm
from jaxgpt.convert.windows import layer_types, read_windows

PREFIX = "model."
NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
OLMO_NORMS = {"post_attention_layernorm": "ln_1_out", "post_feedforward_layernorm": "ln_2_out"}
MLP = {"mlp.gate_proj": "gate_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "down_proj"}
OPTIONS: dict[str, tuple[str, Any]] = {  # option: (setting, default of LlamaConfig)
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("n_embd", 4096),
    "intermediate_size": ("n_inner", 11008),
    "num_hidden_layers": ("n_layer", 32),
    "num_attention_heads": ("n_head", 32),
    "num_key_value_heads": ("n_kv_head", 0),
    "head_dim": ("head_dim", 0),
    "max_position_embeddings": ("block_size", 2048),
    "hidden_act": ("activation", "silu"),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "tie_word_embeddings": ("tie_embeddings", False),
}
PLAIN_ATTENTION = {
    "attention_dropout": 0.0,
    "attention_bias": False,
}  # values of `Family.only` common to the families below, except Llama


def make_form(
    norms: Mapping[str, str], offset: float = 0.0, q_gain: float = 1.0, mlp: Mapping[str, str] = MLP
) -> Format:
    """Return the names and layout of a family's tensors.

    Args:
        norms: map from the names of a layer's norms in transformers to their names in jaxgpt.
        offset: number added to stored gains; 1 if gains are stored as differences from 1.
        q_gain: factor of the query norm's gain.
        mlp: map from the names of a layer's MLP matrices, or router and experts' matrices, to their names in jaxgpt.
    """
    layer = f"{PREFIX}layers.{{}}."
    layer_norms: list[WeightRow] = []
    for name, leaf in norms.items():
        layer_norms += norm(f"{layer}{name}", f"h_{{}}/{leaf}", offset)
    layer_mlp: list[WeightRow] = []
    for name, leaf in mlp.items():
        layer_mlp += matrix(f"{layer}{name}", f"mlp/{leaf}")

    table = (
        WeightRow(f"{PREFIX}embed_tokens.weight", ("wte/embedding",)),
        *layer_norms,
        *matrix(f"{layer}self_attn.q_proj", "attn/q_proj"),
        *matrix(f"{layer}self_attn.k_proj", "attn/k_proj"),
        *matrix(f"{layer}self_attn.v_proj", "attn/v_proj"),
        *matrix(f"{layer}self_attn.o_proj", "attn/o_proj"),
        *norm(f"{layer}self_attn.q_norm", "h_{}/attn/q_norm", offset, q_gain),
        *norm(f"{layer}self_attn.k_norm", "h_{}/attn/k_norm", offset),
        *layer_mlp,
        *norm(f"{PREFIX}norm", "ln_f", offset),
        WeightRow(HEAD, ("lm_head/kernel",), output_first=True),
    )
    return Format(table, PREFIX, f"{PREFIX}embed_tokens.weight")


def changed_options(*omitted: str, **defaults: Any) -> dict[str, tuple[str, Any]]:
    """Return `OPTIONS` without the omitted options, and with some defaults replaced."""
    options = {}
    for name, (setting, default) in OPTIONS.items():
        if name not in omitted:
            options[name] = (setting, defaults.get(name, default))
    return options


def _read_llama(options: Options, config: ModelConfig) -> dict[str, Any]:
    """Read RoPE, and whether all matrices have biases."""
    bias = options.read("attention_bias", False)
    if options.read("mlp_bias", False) != bias:
        raise options.refuse("mlp_bias", not bias, f"it must equal attention_bias, {bias}")
    return read_rope(options, config) | {"bias": bias}


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    form=make_form(NORMS),
    options=OPTIONS,
    settings={"positions": "rope", "norm": "rmsnorm", "mlp": "gated", "bias": False},
    only={"attention_dropout": 0.0, "bias": False},
    fills={"norm_affine": True, "dropout": 0.0},
    read=_read_llama,
    write=lambda config: write_rope(config) | {"attention_bias": config.bias, "mlp_bias": config.bias},
)
MISTRAL = LLAMA._replace(
    name="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    options=changed_options(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=4096 * 32)
    | {"sliding_window": ("sliding_window", 4096)},
    only=PLAIN_ATTENTION,
    read=read_rope,
    write=lambda config: write_rope(config) | {"sliding_window": config.sliding_window or None},
)


def _read_qwen(options: Options, config: ModelConfig) -> dict[str, Any]:
    """Read RoPE and, if `use_sliding_window` is true, the sliding window.

    By default, layers starting at index `max_window_layers` have the window.
    """
    window = options.read("sliding_window", 4096)
    first = options.read("max_window_layers", 28)
    if not options.read("use_sliding_window", False):
        window = 0

    without_window = config.n_layer
    if window:
        without_window = max(0, min(first, config.n_layer))
    pattern = "G" * without_window + "L" * (config.n_layer - without_window)
    rope = read_rope(options, config)
    return rope | read_windows(options, config.n_layer, window, pattern)


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    """Return the options of RoPE, and of sliding windows, which begin at layer `max_window_layers`."""
    kinds = layer_types(config)
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else config.n_layer
    return write_rope(config) | {
        "use_sliding_window": first < config.n_layer,
        "sliding_window": config.sliding_window or None,
        "max_window_layers": first,
        "layer_types": kinds,
    }


QWEN: dict[str, Any] = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
QWEN2 = LLAMA._replace(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    options=changed_options(**QWEN),
    settings=LLAMA.settings | {"qkv_bias": True},
    only=PLAIN_ATTENTION | {"use_mrope": False},
    fills=LLAMA.fills | {"qkv_bias": True},
    read=_read_qwen,
    write=_write_qwen,
)
QWEN3 = QWEN2._replace(
    name="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    options=changed_options(**QWEN, head_dim=128),
    settings=LLAMA.settings | {"qk_norm": True},
    fills=LLAMA.fills,
)
OLMO2 = LLAMA._replace(
    name="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    form=make_form(OLMO_NORMS),
    options=changed_options(vocab_size=50304, rms_norm_eps=1e-5),
    settings=LLAMA.settings | {"norm_position": "output", "qk_norm": True, "qk_norm_per_head": False},
    only=PLAIN_ATTENTION,
    read=read_rope,
    write=write_rope,
)
