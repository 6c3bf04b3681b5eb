"""llama.cpp architectures: names, layout and metadata of GGUF files, derived from the transformers families.

A family has one table of tensors, with transformers' names; the gguf package maps them to llama.cpp's names. An
`Architecture` adds the metadata keys, and what llama.cpp computes regardless of the file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.convert import experts, gemma, gpt2, llama, neox
from jaxgpt.convert.divisors import ORIGINAL_CONTEXT, ROPE_DIVISORS, read_divisors, rope_divisors
from jaxgpt.convert.family import Family, canonical, period
from jaxgpt.convert.options import Options
from jaxgpt.convert.rope import is_linear, linear_scaling
from jaxgpt.convert.tensors import Format, WeightRow
from jaxgpt.errors import UserError, short_repr
from jaxgpt.ops.rotary import Llama3Scaling

Shapes = Mapping[str, tuple[int, ...]]

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
OUTPUT_BIAS = "blk.0.attn_output.bias"
QUERY_BIAS = "blk.0.attn_q.bias"
FACTS = (HEAD, OUTPUT_BIAS, QUERY_BIAS, ROPE_DIVISORS)  # tensors that show a setting
ROUTER = "ffn_gate_inp.weight"  # name of a router in its block; files store it as float32
PATTERN = "attention.sliding_window_pattern"
RMS_EPS = "attention.layer_norm_rms_epsilon"
LAYER_EPS = "attention.layer_norm_epsilon"

# Metadata keys, without the name of the architecture: (setting, default of llama.cpp, or type if the key is required).
KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", int),
    "context_length": ("block_size", int),
    "block_count": ("n_layer", int),
    "embedding_length": ("n_embd", int),
    "attention.head_count": ("n_head", int),
    "attention.head_count_kv": ("n_kv_head", 0),
    "attention.key_length": ("head_dim", 0),
}
WIDTH = "feed_forward_length"
OF_EXPERTS: dict[str, tuple[str, Any]] = {
    "expert_count": ("n_experts", int),
    "expert_used_count": ("experts_per_token", int),
}
SOFTCAP = "final_logit_softcapping"
ONLY = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}
# Metadata that llama.cpp reads only for YaRN scaling, which is rejected, or that it only prints.
UNREAD = (ORIGINAL_CONTEXT, "rope.scaling.finetuned", "tensor_data_layout")
YARN = ("log_multiplier", "ext_factor", "attn_factor", "beta_fast", "beta_slow")


class SlidingWindows(NamedTuple):
    """Default sliding windows of an architecture.

    Attributes:
        period: length of the repeated pattern of layers; only the last layer of the pattern has no window.
        theta: RoPE base in layers with a window; 0: the base of the other layers.
    """

    period: int
    theta: float = 0.0


class Architecture(NamedTuple):
    """A llama.cpp architecture.

    Attributes:
        name: `general.architecture`.
        family: transformers family with the same tensors.
        activation: activation in its graph; no metadata key changes it.
        eps: metadata key of the epsilon of norms.
        interleaved: whether RoPE rotates adjacent channels of a head, so that rows of queries and keys are reordered.
        windows: default sliding windows; None: its graph has no windows.
        tied: whether a file may lack the head, which then equals the embedding.
        head_dim: whether the head width may differ from the model width per head.
        grouped: whether query heads may share a key head.
        width: metadata key of the width of the MLP, or of each expert.
        normalized: whether its graph divides the scores of a token's experts by their sum; None: it has no experts.
        reads_divisors: whether its graph reads the tensor `ROPE_DIVISORS`.
        rotates_part: whether RoPE may rotate fewer channels than a head has.
        scales_queries: whether its graph divides the scores by a different number than the family (`_query_factor`).
        more_keys: metadata keys besides `KEYS`, in the same form.
    """

    name: str
    family: Family
    activation: str = "silu"
    eps: str = RMS_EPS
    interleaved: bool = False
    windows: SlidingWindows | None = None
    tied: bool = True
    head_dim: bool = True
    grouped: bool = True
    width: str = WIDTH
    normalized: bool | None = None
    reads_divisors: bool = False
    rotates_part: bool = False
    scales_queries: bool = False
    more_keys: Mapping[str, tuple[str, Any]] = MappingProxyType({})


GELU: Literal["gelu_new"] = "gelu_new"  # llama.cpp computes GELU with tanh
ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", llama.LLAMA, interleaved=True, reads_divisors=True),  # also Mistral
        Architecture("qwen2", llama.QWEN2, head_dim=False),
        Architecture("qwen3", llama.QWEN3),
        Architecture("olmo2", llama.OLMO2, windows=SlidingWindows(period=4), tied=False, head_dim=False),
        Architecture(
            "gemma3",
            gemma.FAMILY,
            GELU,
            windows=SlidingWindows(period=6, theta=10_000.0),
            scales_queries=True,
            more_keys={SOFTCAP: ("logit_softcap", 0.0)},
        ),
        Architecture("gpt2", gpt2.FAMILY, GELU, LAYER_EPS),
        Architecture(
            "gptneox",
            neox.FAMILY,
            GELU,
            LAYER_EPS,
            tied=False,
            rotates_part=True,
            more_keys={"use_parallel_residual": ("parallel_residual", bool)},
        ),
    )
}
# Architectures with experts. A file of "llama" has experts if its `expert_count` is not 0.
WITH_EXPERTS = {
    each.name: each
    for each in (
        Architecture("llama", experts.MIXTRAL, interleaved=True, normalized=True, reads_divisors=True),
        Architecture("qwen3moe", experts.QWEN3_MOE, width="expert_feed_forward_length", normalized=True),
        Architecture("olmoe", experts.OLMOE, tied=False, head_dim=False, grouped=False, normalized=False),
    )
}


def open_model(
    metadata: Mapping[str, Any], shapes: Shapes, divisors: np.ndarray | None, where: str, accept: Collection[str] = ()
) -> tuple[Architecture, ModelConfig]:
    """Return the architecture and config of a file.

    Args:
        metadata: the metadata of the file.
        shapes: shapes of its tensors, keyed by name.
        divisors: content of the tensor `ROPE_DIVISORS`; None: the file has no such tensor.
        where: path of the file, for errors.
        accept: unsupported metadata keys to ignore, without the name of the architecture.

    Raises:
        UserError: if the architecture or a metadata key is not supported.
    """
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UserError(f"{where}: general.type {short_repr(kind)} is not supported: choose the GGUF file of a model")

    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in (*ARCHITECTURES, *WITH_EXPERTS):
        known = ", ".join(dict.fromkeys((*ARCHITECTURES, *WITH_EXPERTS)))
        raise UserError(
            f"{where}: general.architecture {short_repr(name)} is not supported: use one of {known}, or import a "
            f"directory of safetensors"
        )

    prefix = f"{name}."
    has_experts = name not in ARCHITECTURES or metadata.get(f"{prefix}expert_count", 0) != 0
    architecture = WITH_EXPERTS[name] if has_experts and name in WITH_EXPERTS else ARCHITECTURES[name]
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    values |= _facts(shapes)
    if divisors is not None:
        values[ROPE_DIVISORS] = read_divisors(values, divisors, where)

    options = Options(values, where, accept)
    model = family(architecture).config_from_hf(options)
    options.done()
    return architecture, model


def architecture_of(name: str) -> Architecture:
    """Return the architecture of a transformers family."""
    for architecture in (*ARCHITECTURES.values(), *WITH_EXPERTS.values()):
        if name == architecture.family.name:
            return architecture
    if name != llama.MISTRAL.name:
        raise UserError(f"{name} models cannot be written as a GGUF file: export a directory")
    return ARCHITECTURES["llama"]


def express(architecture: Architecture, model: ModelConfig) -> ModelConfig:
    """Return the equivalent config, as an import of the GGUF file reads it.

    Raises:
        UserError: if llama.cpp computes a different function; the error names the setting.
    """
    if not architecture.tied:
        model = replace(model, tie_embeddings=False)  # the head is written as a copy of the embedding
    if model.activation == "gelu" and architecture.activation == GELU:
        model = replace(model, activation=GELU)
    has_windows = any(0 < window < model.block_size for window in model.windows)
    if not has_windows and not architecture.windows:
        model = replace(model, sliding_window=0, window_pattern="L", rope_local_theta=0.0)
    width = model.n_embd // model.n_head
    if not architecture.head_dim and model.head_width != width:
        raise UserError(
            f"model.head_dim {model.head_width} has no llama.cpp {architecture.name} equivalent: it must be {width}"
        )
    if not architecture.grouped and model.kv_heads != model.n_head:
        raise UserError(
            f"model.n_kv_head {model.kv_heads} has no llama.cpp {architecture.name} equivalent: it must be {model.n_head}"
        )
    return family(architecture).express(model)


def describe(architecture: Architecture, model: ModelConfig) -> dict[str, Any]:
    """Return the metadata of a config returned by `express`."""
    reader = family(architecture)
    model = canonical(model)
    values = {key: getattr(model, setting) for key, (setting, _) in reader.options.items()}
    values |= _write(architecture, model)
    return {
        f"{architecture.name}.{key}": value for key, value in values.items() if key not in FACTS and value is not None
    }


def divisors(architecture: Architecture, model: ModelConfig) -> np.ndarray | None:
    """Return the content of the tensor `ROPE_DIVISORS`, float32 `[H / 2]`; None: the file has no such tensor."""
    if ROPE_DIVISORS not in _write(architecture, model):
        return None
    scaling = Llama3Scaling(model.rope_factor, original_context=model.rope_original_context)
    return rope_divisors(model.head_width, model.rope_theta, scaling)


def form(architecture: Architecture, config: ModelConfig) -> Format:
    """Return the names and layout of the tensors, from the table of the transformers family.

    Matrices are stored as `[out, in]` with queries, keys and values concatenated, and gains as they are multiplied. The
    matrices of all experts are one tensor, `[E, out, in]`.
    """
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, 1)  # names of a model with one layer
    table = []
    for row in architecture.family.form.table:
        in_first_layer = row.name.replace(".{expert}", "").format(0)
        name = names.get_name(in_first_layer, try_suffixes=(".weight", ".bias"))
        # No architecture here has biases of norms and matrices that the map lacks.
        if name is None:
            continue
        if "{}" in row.name:
            name = name.replace("blk.0.", "blk.{}.")
        table.append(_stored(architecture, row, name, config))
    return Format(tuple(table), prefix="", tied=EMBEDDING, head=HEAD)


def family(architecture: Architecture) -> Family:
    """Return the family whose options are metadata keys, and names of tensors that show a setting."""
    keys = KEYS | {architecture.width: ("n_inner", int), architecture.eps: ("norm_eps", float)}
    fixed: dict[str, Any] = {"activation": architecture.activation}
    if architecture.normalized is not None:
        keys |= OF_EXPERTS
        fixed["router_normalize"] = architecture.normalized
    keys |= architecture.more_keys

    return architecture.family._replace(
        name=f"llama.cpp {architecture.name}",
        options=keys,
        settings=architecture.family.settings | fixed,
        only={key: value for key, value in ONLY.items() if key not in keys},
        read=partial(_read, architecture),
        write=partial(_write, architecture),
    )


def _read(architecture: Architecture, options: Options, config: ModelConfig) -> dict[str, Any]:
    """Return the settings that the table of keys lacks: the inverse of `_write`."""
    options.only("attention.value_length", config.head_width)
    if architecture.width != WIDTH:
        options.skip(WIDTH)  # the width of layers without experts
    settings = _read_biases(options)
    if config.positions == "rope":
        settings |= _read_rope(options, config, architecture)
    if architecture.windows:
        theta = architecture.windows.theta or settings["rope_theta"]
        settings |= _read_windows(options, config, architecture.windows.period, theta)
    return settings


def _write(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Return the metadata and facts that the table of keys lacks: the inverse of `_read`."""
    values: dict[str, Any] = {
        HEAD: not config.tie_embeddings,
        OUTPUT_BIAS: config.bias,
        QUERY_BIAS: config.bias or config.qkv_bias,
        "attention.value_length": config.head_width,
    }
    if architecture.width != WIDTH:
        values[WIDTH] = config.mlp_width
    if SOFTCAP in architecture.more_keys:
        values[SOFTCAP] = config.logit_softcap or None  # None: the file has no such key
    if config.positions == "rope":
        values |= _write_rope(architecture, config)
    if architecture.windows and any(config.windows):
        theta = config.rope_local_theta or config.rope_theta
        values |= _write_windows(architecture.windows, config, theta)
    return values


def _write_rope(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope.freq_base": config.rope_theta, "rope.dimension_count": config.rotary_width}
    if config.rope_factor == 1.0:
        return values
    if is_linear(config):
        return values | {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_factor}
    if not architecture.reads_divisors or config.rope_scaling == "yarn":
        return values
    # A file has no other settings of the scaling: the lower and upper factors have their defaults.
    scaling = {"rope_factor": config.rope_factor, "rope_original_context": config.rope_original_context}
    return values | {ROPE_DIVISORS: scaling, ORIGINAL_CONTEXT: config.rope_original_context}


def _write_windows(windows: SlidingWindows, config: ModelConfig, theta: float) -> dict[str, Any]:
    """Return the metadata of sliding windows; the default pattern is omitted."""
    values: dict[str, Any] = {"attention.sliding_window": config.sliding_window, "rope.freq_base_swa": theta}
    layers = "".join("L" if window else "G" for window in config.windows)
    default = _pattern(windows.period)
    repeats = math.ceil(config.n_layer / windows.period)
    if layers != (default * repeats)[: config.n_layer]:
        pattern = period(layers)
        values[PATTERN] = len(pattern) if "G" in pattern else 0
    return values


def _facts(shapes: Shapes) -> dict[str, Any]:
    """Return settings that the tensors show: the vocabulary, a separate head, and biases."""
    facts: dict[str, Any] = {name: name in shapes for name in (HEAD, OUTPUT_BIAS, QUERY_BIAS)}
    embedding = shapes.get(EMBEDDING, ())
    if embedding:
        facts["vocab_size"] = embedding[0]  # possibly above the vocab_size of the metadata
    return facts


def _read_biases(options: Options) -> dict[str, Any]:
    all_biases = options.read(OUTPUT_BIAS, False)
    query_bias = options.read(QUERY_BIAS, False)
    return {
        "tie_embeddings": not options.read(HEAD, True),
        "bias": all_biases,
        "qkv_bias": query_bias and not all_biases,
    }


def _read_rope(options: Options, config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """Read the base, the rotated channels, and linear scaling or the scaling that the divisors show."""
    settings: dict[str, Any] = {"rope_theta": options.read("rope.freq_base", 10_000.0)}
    if architecture.rotates_part:
        rotated = options.read("rope.dimension_count", config.head_width)
        settings["rope_fraction"] = _fraction(rotated, config.head_width)
    else:
        options.only("rope.dimension_count", config.head_width)

    kind = options.read("rope.scaling.type", "linear")
    old_factor = options.read("rope.scale_linear", 0.0)
    factor = options.read("rope.scaling.factor", old_factor)
    if kind not in ("none", "linear"):
        raise options.refuse("rope.scaling.type", kind, "expected none or linear")
    options.skip(*UNREAD, *(f"rope.scaling.yarn_{name}" for name in YARN))
    scaled = kind == "linear" and factor not in (0.0, 1.0)
    if scaled:
        settings |= {"rope_factor": factor} | linear_scaling(config.block_size)

    if architecture.reads_divisors:
        divisors = options.read(ROPE_DIVISORS, {})
        if divisors and scaled:
            raise options.refuse("rope.scaling.factor", factor, f"{ROPE_DIVISORS} also scales RoPE")
        settings |= divisors
    return settings


def _fraction(part: int, width: int) -> float:
    """Return the fraction of the channels of a head, such that `int(width * fraction) == part`."""
    fraction = part / width
    if int(width * fraction) < part:  # such as 26 of 46
        fraction = math.nextafter(fraction, math.inf)
    return fraction


def _read_windows(options: Options, config: ModelConfig, length: int, theta: float) -> dict[str, Any]:
    """Read the sliding window and its pattern. RoPE in layers with a window has its own base, and no scaling.

    `length` is the default length of the pattern, and `theta` the default base.
    """
    window = options.read("attention.sliding_window", 0)
    value = options.take(PATTERN, length)
    letters = _letters(value)
    if not letters:
        raise options.refuse(PATTERN, value, "it must be a period or a list of booleans")
    theta = options.read("rope.freq_base_swa", theta)
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        options.only(name, config.head_width)
    repeats = math.ceil(config.n_layer / len(letters))
    layers = period((letters * repeats)[: config.n_layer])
    if not window or "L" not in layers:
        return {}
    return {"sliding_window": window, "window_pattern": layers, "rope_local_theta": theta}


def _letters(value: Any) -> str:
    """Convert a pattern of layers with a window: a period, or a boolean per layer; "" for other values."""
    if type(value) is int and 0 <= value < 1024:
        return _pattern(value)
    if isinstance(value, list) and value and all(type(each) is bool for each in value):
        return "".join("L" if each else "G" for each in value)
    return ""


def _pattern(length: int) -> str:
    """Return the pattern of a period: all layers but the last have a window; 0: all layers."""
    return "L" * (length - 1) + "G" if length else "L"


def _stored(architecture: Architecture, row: WeightRow, name: str, config: ModelConfig) -> WeightRow:
    """Return the row of a tensor in llama.cpp's layout."""
    leaf = row.leaves[0]
    is_matrix = leaf.endswith("/kernel")
    is_rotated = "/q_proj/" in leaf or "/k_proj/" in leaf
    factor = 1.0
    if architecture.scales_queries and leaf.endswith("/q_norm/scale"):
        factor = _query_factor(config)
    return WeightRow(
        name,
        row.leaves,
        output_first=is_matrix,
        interleaved=architecture.interleaved and is_rotated,
        factor=factor,
    )


def _query_factor(config: ModelConfig) -> float:
    """Return the factor of the gain of Gemma's query norm.

    llama.cpp divides scores by the square root of the head width. Gemma 3 27B, recognized by its number of layers, is an
    exception: the divisor is the square root of the model width per head.
    """
    if config.n_layer != 62:
        return 1.0
    return math.sqrt(config.head_width / (config.n_embd // config.n_head))
