"""Write safetensors files one tensor at a time, so that memory need not hold two copies of a model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxgpt.atomic import write_json
from jaxgpt.convert.files import INDEX, SINGLE
from jaxgpt.errors import UserError

SHARD_BYTES = 5 * 10**9  # default maximum size of a file of several tensors, in bytes


class Dtype(NamedTuple):
    """A type of the weights in an export: its name in safetensors, and in NumPy."""

    stored: str
    numpy: np.dtype[Any]


DTYPES = {
    "float32": Dtype("F32", np.dtype(np.float32)),
    "float16": Dtype("F16", np.dtype(np.float16)),
    "bfloat16": Dtype("BF16", np.dtype(ml_dtypes.bfloat16)),
}


class Tensor(NamedTuple):
    """A named tensor to write, computed when it is written."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]  # returns the tensor, contiguous float32


def write_safetensors(path: Path, tensors: Sequence[Tensor], dtype: str = "float32") -> None:
    """Write tensors in a type of `DTYPES`, one at a time.

    The format is the length of the header in 8 bytes, a JSON header, and the elements (huggingface/safetensors, README).

    Raises:
        UserError: if an element is outside the range of the type.
        OSError: if the file cannot be written; the error contains the path.
    """
    try:
        _write_safetensors(path, tensors, dtype)
    except OSError as e:  # an error without the path if writing fails after opening
        raise OSError(e.errno, e.strerror, str(path)) from None


def _write_safetensors(path: Path, tensors: Sequence[Tensor], dtype: str) -> None:
    """Write the header and the tensors to a file, and flush the file to the disk."""
    kind = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin = end
        end += tensor_bytes(tensor, dtype)
        header[tensor.name] = {"dtype": kind.stored, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = tensor.read()
            assert value.shape == tensor.shape, tensor.name
            assert value.dtype == np.float32, tensor.name
            assert f.tell() == 8 + len(text) + header[tensor.name]["data_offsets"][0], tensor.name
            f.write(rounded(tensor.name, value, dtype).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())


def write_shards(
    directory: Path, tensors: Sequence[Tensor], dtype: str = "float32", shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors to model.safetensors or, beyond `shard_bytes`, to several files with an index, as transformers does.

    A tensor larger than `shard_bytes` gets a separate file.
    """
    shards: list[list[Tensor]] = [[]]
    filled = 0
    total = 0
    for tensor in tensors:
        size = tensor_bytes(tensor, dtype)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
        total += size
    if len(shards) == 1:
        write_safetensors(directory / SINGLE, tensors, dtype)
        return

    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(directory / name, shard, dtype)
        files |= {tensor.name: name for tensor in shard}
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def tensor_bytes(tensor: Tensor, dtype: str) -> int:
    """Return the size of a tensor in a file, in bytes."""
    return DTYPES[dtype].numpy.itemsize * math.prod(tensor.shape)


def rounded(name: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """Convert a float32 tensor to a type of `DTYPES`.

    Raises:
        UserError: for a type other than float32, if an element is outside its range, infinite or NaN.
    """
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(value, DTYPES[dtype].numpy)
    if dtype == "float32" or np.isfinite(converted).all():
        return converted
    if not np.isfinite(value).all():
        raise UserError(f"tensor {name} has infinite or NaN elements: export an earlier checkpoint")
    largest = float(np.abs(value).max())
    wider = "bfloat16" if dtype == "float16" else "float32"
    raise UserError(
        f"tensor {name} has elements beyond the range of {dtype}: {largest:.3g}; export with --dtype {wider}"
    )
