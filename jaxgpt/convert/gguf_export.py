"""Export a run to a GGUF file for llama.cpp."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.convert import gguf_describe, llamacpp
from jaxgpt.convert.divisors import ROPE_DIVISORS
from jaxgpt.convert.drafts import new_file
from jaxgpt.convert.families import exported_form
from jaxgpt.convert.llamacpp_architectures import Architecture, architecture_of
from jaxgpt.convert.models import Converted, exported_special_tokens
from jaxgpt.convert.open_model import read_model
from jaxgpt.convert.probes import check_change, largest_change, probe_logits
from jaxgpt.convert.write_files import Tensor
from jaxgpt.convert.write_weights import tensors_of
from jaxgpt.errors import UserError, reported
from jaxgpt.lm import load
from jaxgpt.model.params import count_parameters

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # types that the gguf package writes
FILE_TYPES = {"f32": "ALL_F32"}  # names of other types: MOSTLY_Q8_0


def export_gguf(run: str | Path, target: Path, kind: str = "f32", checkpoint: str = "best") -> Converted:
    """Export a run to a GGUF file for llama.cpp, with its tokenizer.

    Args:
        run: run to convert.
        target: a new path; the file is created atomically, after reading it back and comparing the logits.
        kind: type of the matrices, one of `TYPES`; vectors and routers are float32.
        checkpoint: `best` (lowest validation loss), `last`, or a step.

    Raises:
        UserError: if the run or checkpoint does not exist, `target` exists, or llama.cpp has no equivalent of a setting or of
            the tokenizer.
        RuntimeError: if the exported model computes different logits, although the types and the activation are unchanged.
    """
    kind = kind.lower()  # llama.cpp's spelling is Q8_0
    _check_type(kind)
    with new_file(target) as draft:
        lm = load(run, checkpoint)
        config = lm.config
        params = lm.params
        tokenizer = lm.tokenizer

        family, model = exported_form(config.model)
        architecture = architecture_of(family.name)
        model = llamacpp.express(architecture, model)

        tokenizer.special = exported_special_tokens(tokenizer, config, gguf_describe.ALWAYS)
        described = gguf_describe.describe(tokenizer, model.vocab_size)
        metadata = {
            "general.name": _name(run),
            "general.file_type": _file_type(kind),
            **llamacpp.describe(architecture, model),
            **described.metadata,
        }

        tensors = _tensors(architecture, config.model, model, params)
        stored = {tensor.name: _stored_type(tensor, kind) for tensor in tensors}
        with reported(f"cannot write {target}"):
            write_gguf(draft, architecture.name, metadata, tensors, stored)

        before = probe_logits(config.model, params)
        del lm, params, tensors
        after = probe_logits(*read_model(draft)[:2])
        # Rounded weights, and GELU computed with tanh, change the logits.
        if kind == "f32" and model.activation == config.model.activation:
            check_change(before, after)
    change = largest_change(before, after)
    return Converted(
        family=f"llama.cpp {architecture.name}",
        parameters=count_parameters(config.model),
        max_logit_change=change,
        engines=("llama.cpp",),
        note=described.note,
    )


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Sequence[Tensor], stored: Mapping[str, Any]
) -> None:
    """Write a GGUF file, one tensor at a time.

    Args:
        path: file to write.
        architecture: `general.architecture`.
        metadata: metadata other than the architecture, keyed by name.
        tensors: the tensors, in the order of the file.
        stored: type of each tensor in the file, keyed by name.
    """
    import gguf

    with closing(gguf.GGUFWriter(path, architecture)) as writer:
        for name, value in metadata.items():
            _add(writer, name, value)

        # All shapes come before the first tensor.
        for tensor in tensors:
            kind = stored[tensor.name]
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()

        for tensor in tensors:
            writer.write_tensor_data(_quantized(tensor, stored[tensor.name]))
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _tensors(architecture: Architecture, original: ModelConfig, model: ModelConfig, params: Any) -> list[Tensor]:
    """List the tensors of a file: the model, including a copy of a tied embedding as head, and RoPE divisors."""
    if original.tie_embeddings and not model.tie_embeddings:
        params = dict(params) | {"lm_head": {"kernel": np.asarray(params["wte"]["embedding"]).T}}
    tensors = tensors_of(params, model, llamacpp.form(architecture, model))
    divisors = llamacpp.divisors(architecture, model)
    if divisors is not None:
        tensors.append(Tensor(ROPE_DIVISORS, divisors.shape, lambda: divisors))
    return tensors


def _quantized(tensor: Tensor, kind: Any) -> np.ndarray:
    """Return the bytes of a tensor in a type; raise `UserError` if an element is outside its range."""
    from gguf.quants import dequantize, quantize

    value = tensor.read()
    with np.errstate(over="ignore", invalid="ignore"):
        data: np.ndarray = quantize(value, kind)
        is_finite = np.isfinite(dequantize(data, kind)).all()
    if not is_finite:
        largest = float(np.abs(value).max())
        raise UserError(
            f"tensor {tensor.name} has elements beyond the range of {kind.name.lower()}: {largest:.3g}; "
            f"export with --type bf16"
        )
    return data


def _check_type(kind: str) -> None:
    """Raise `UserError` if the gguf package is missing or cannot write a type."""
    try:
        import gguf  # noqa: F401 - its absence is reported before the work
    except ImportError:
        raise UserError("GGUF files need the gguf package: pip install 'jaxgpt[gguf]'") from None
    if kind not in TYPES:
        raise UserError(
            f"cannot write type {kind}: use one of {', '.join(TYPES)}; for other types, run llama-quantize on an f16 file"
        )


def _stored_type(tensor: Tensor, kind: str) -> Any:
    """Return the type of a tensor in the file: float32 for vectors and routers."""
    import gguf

    if len(tensor.shape) == 1 or tensor.name.endswith(f".{llamacpp.ROUTER}"):
        return gguf.GGMLQuantizationType.F32
    stored = gguf.GGMLQuantizationType[kind.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[stored]
    if tensor.shape[-1] % block:
        raise UserError(
            f"cannot write {tensor.name} of shape {tensor.shape} as {kind}: its rows are not multiples of {block}; use f16"
        )
    return stored


def _name(run: str | Path) -> str:
    """Return the name of a model, without "phi3" and "phi-3": they make llama.cpp remove spaces after special tokens."""
    return re.sub("(phi)-?3", r"\1 3", Path(run).name, flags=re.IGNORECASE)


def _file_type(kind: str) -> int:
    """Return the value of `general.file_type` for a type of matrices."""
    import gguf

    return int(gguf.LlamaFileType[FILE_TYPES.get(kind, f"MOSTLY_{kind.upper()}")])


def _add(writer: Any, name: str, value: Any) -> None:
    """Add a metadata value with the type that llama.cpp expects."""
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)
