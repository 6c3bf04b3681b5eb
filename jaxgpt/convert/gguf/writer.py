"""Write GGUF files with the gguf package, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.convert.write_files import Tensor
from jaxgpt.errors import UserError

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # types of matrices to choose from


def check_type(kind: str) -> None:
    """Raise `UserError` if the gguf package is missing, or a type is not in `TYPES`."""
    try:
        import gguf  # noqa: F401 - its absence is reported before the work
    except ImportError:
        raise UserError("GGUF files need the gguf package: pip install 'jaxgpt[gguf]'") from None
    if kind not in TYPES:
        raise UserError(
            f"cannot write type {kind}: use one of {', '.join(TYPES)}; for other types, run llama-quantize on an f16 file"
        )


def file_type(kind: str) -> int:
    """Return the value of `general.file_type` for a type of matrices."""
    import gguf

    name = "ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"
    return int(gguf.LlamaFileType[name])


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Sequence[Tensor], types: Mapping[str, Any]
) -> None:
    """Write a GGUF file, one tensor at a time.

    Args:
        path: file to write.
        architecture: `general.architecture`.
        metadata: metadata other than the architecture, keyed by name.
        tensors: the tensors, in the order of the file.
        types: `gguf.GGMLQuantizationType` of each tensor in the file, keyed by name.
    """
    import gguf

    with closing(gguf.GGUFWriter(path, architecture)) as writer:
        for name, value in metadata.items():
            _add(writer, name, value)

        # The file lists all shapes before the first tensor.
        for tensor in tensors:
            kind = types[tensor.name]
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()

        for tensor in tensors:
            writer.write_tensor_data(_quantized(tensor, types[tensor.name]))
    with path.open("rb") as file:
        os.fsync(file.fileno())


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
