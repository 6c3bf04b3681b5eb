"""Convert model configs to and from llama.cpp metadata, with rules derived from the transformers families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.convert.canonical import canonical
from jaxgpt.convert.llamacpp.architectures import ARCHITECTURES, GELU, WITH_EXPERTS, Architecture
from jaxgpt.convert.llamacpp.divisors import ROPE_DIVISORS, read_divisors, rope_divisors
from jaxgpt.convert.llamacpp.layout import EMBEDDING
from jaxgpt.convert.llamacpp.metadata import HEAD, OUTPUT_BIAS, QUERY_BIAS, family
from jaxgpt.convert.options import Options
from jaxgpt.errors import UserError, short_repr
from jaxgpt.ops.rotary import Llama3Scaling

Shapes = Mapping[str, tuple[int, ...]]

FACTS = (HEAD, OUTPUT_BIAS, QUERY_BIAS, ROPE_DIVISORS)  # tensors that show a setting by their presence


def config_from_metadata(
    metadata: Mapping[str, Any], shapes: Shapes, divisors: np.ndarray | None, where: str, accept: Collection[str] = ()
) -> tuple[Architecture, ModelConfig]:
    """Return the architecture and config of a file.

    Args:
        metadata: metadata of the file, keyed by name.
        shapes: shapes of its tensors, keyed by name.
        divisors: content of the tensor `ROPE_DIVISORS`; None: the file has no such tensor.
        where: path of the file, for errors.
        accept: unsupported metadata keys to ignore, without the name of the architecture.

    Raises:
        UserError: if the kind of file, the architecture, a metadata key or the scaling of the divisors is not supported, or a
            required key is missing.
    """
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UserError(f"{where}: general.type {short_repr(kind)} is not supported: choose the GGUF file of a model")

    architecture = _architecture(metadata, where)
    prefix = f"{architecture.name}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    values |= _facts(shapes)
    if divisors is not None:
        values[ROPE_DIVISORS] = read_divisors(values, divisors, where)

    options = Options(values, where, accept)
    model = family(architecture).config_from_hf(options)
    options.done()
    return architecture, model


def _architecture(metadata: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture named in a file; files of the architecture llama may have experts."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in (*ARCHITECTURES, *WITH_EXPERTS):
        known = ", ".join(dict.fromkeys((*ARCHITECTURES, *WITH_EXPERTS)))
        raise UserError(
            f"{where}: general.architecture {short_repr(name)} is not supported: use one of {known}, or import a "
            f"directory of safetensors"
        )
    has_experts = metadata.get(f"{name}.expert_count", 0) != 0
    if name not in ARCHITECTURES or (has_experts and name in WITH_EXPERTS):
        return WITH_EXPERTS[name]
    return ARCHITECTURES[name]


def express(architecture: Architecture, model: ModelConfig) -> ModelConfig:
    """Return the equivalent config, as an import of the GGUF file reads it.

    Raises:
        UserError: if llama.cpp computes a different function; the error names the setting.
    """
    _check_heads(architecture, model)
    changes: dict[str, Any] = {}
    if not architecture.may_tie:
        changes["tie_embeddings"] = False  # the head is written as a copy of the embedding
    if model.activation == "gelu" and architecture.activation == GELU:
        changes["activation"] = GELU
    has_windows = any(0 < window < model.block_size for window in model.windows)
    if not has_windows and not architecture.windows:
        changes |= {"sliding_window": 0, "window_pattern": "L", "rope_local_theta": 0.0}
    return family(architecture).express(replace(model, **changes))


def _check_heads(architecture: Architecture, model: ModelConfig) -> None:
    """Raise `UserError` if the architecture cannot express the head width or the number of key/value heads."""
    width = model.n_embd // model.n_head
    if not architecture.may_widen_heads and model.head_width != width:
        raise UserError(
            f"model.head_dim {model.head_width} has no llama.cpp {architecture.name} equivalent: it must be {width}"
        )
    if not architecture.may_share_heads and model.kv_heads != model.n_head:
        raise UserError(
            f"model.n_kv_head {model.kv_heads} has no llama.cpp {architecture.name} equivalent: it must be {model.n_head}"
        )


def config_to_metadata(architecture: Architecture, model: ModelConfig) -> dict[str, Any]:
    """Return the metadata of a config that `express` returned."""
    reader = family(architecture)
    model = canonical(model)
    values = {key: getattr(model, setting) for key, (setting, _) in reader.options.items()}
    values |= reader.write(model)
    return {
        f"{architecture.name}.{key}": value for key, value in values.items() if key not in FACTS and value is not None
    }


def divisors_of(architecture: Architecture, model: ModelConfig) -> np.ndarray | None:
    """Return the content of the tensor `ROPE_DIVISORS`, float32 `[H / 2]`; None: the file has no such tensor."""
    if ROPE_DIVISORS not in family(architecture).write(model):
        return None
    scaling = Llama3Scaling(model.rope_factor, original_context=model.rope_original_context)
    return rope_divisors(model.head_width, model.rope_theta, scaling)


def _facts(shapes: Shapes) -> dict[str, Any]:
    """Return settings that the tensors show: the vocabulary size, a separate head, and biases."""
    facts: dict[str, Any] = {name: name in shapes for name in (HEAD, OUTPUT_BIAS, QUERY_BIAS)}
    embedding = shapes.get(EMBEDDING, ())
    if embedding:
        facts["vocab_size"] = embedding[0]  # possibly above the vocab_size of the metadata
    return facts
