"""Read and write safetensors one tensor at a time, so that memory need not hold two copies of a model."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxgpt.directories import ADDED, GENERATION, MAP, TEMPLATE, TEMPLATES, TOKENIZER
from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.files import read_json, write_json

SINGLE = "model.safetensors"
SECOND_COPY = "consolidated*"  # glob pattern of Mistral's own weight files, duplicates of the transformers files
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FLOATS = ("F32", "F16", "BF16")
INDEX = f"{SINGLE}.index.json"
# Glob patterns of files that transformers reads with an export, or instead of it: an earlier model's files would change it.
OF_TOKENIZERS = (GENERATION, TOKENIZER, TEMPLATE, f"{TEMPLATES}/*.jinja", MAP, ADDED)
OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
OF_MODELS = (SINGLE, INDEX, "model-*-of-*.safetensors", "pytorch_model.bin*", "pytorch_model-*-of-*.bin")
SHARD_BYTES = 5 * 10**9  # maximum size of a file of weights
SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9}  # units of sizes of files


class Dtype(NamedTuple):
    """A type of the weights in an export: its name in safetensors, and in NumPy."""

    stored: str
    numpy: np.dtype[Any]


DTYPES = {
    "float32": Dtype("F32", np.dtype(np.float32)),
    "float16": Dtype("F16", np.dtype(np.float16)),
    "bfloat16": Dtype("BF16", np.dtype(ml_dtypes.bfloat16)),
}


class StoredTensor(NamedTuple):
    """The file, type and shape of a tensor."""

    file: Path
    dtype: str  # type in the file's header, such as BF16
    shape: tuple[int, ...]


class Weights:
    """The tensors of safetensors files; a subclass reads a different format.

    Args:
        path: directory or file of the model, for errors.
        tensors: dict of `StoredTensor`, keyed by name.
    """

    def __init__(self, path: Path, tensors: dict[str, StoredTensor]) -> None:
        self.path = path
        self.tensors = tensors

    def read(self, name: str) -> np.ndarray:
        """Read one tensor as float32. Raises `UserError` if the tensor contains non-finite numbers."""
        tensor = self._load(name)
        if not np.isfinite(tensor).all():
            raise UserError(
                f"{self.tensors[name].file}: tensor {name} contains non-finite numbers: choose different weights"
            )
        return tensor

    def _load(self, name: str) -> np.ndarray:
        # Open the file for each tensor: pages touched by a long-lived mapping count as memory of this process.
        with _opened(self.tensors[name].file) as f:
            tensor: np.ndarray = f.get_tensor(name).astype(np.float32, copy=False)
        return tensor

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignored: Collection[str] = ()) -> None:
        """Raise `UserError` if a tensor is missing or unexpected, or has a wrong shape or unsupported type.

        Args:
            shapes: shape of each tensor, keyed by name.
            ignored: names of further tensors, which are not read.
        """
        missing = [name for name in shapes if name not in self.tensors]
        if missing:
            raise UserError(
                f"{self.path}: tensor {missing[0]} of shape {shapes[missing[0]]} is missing{_more(missing)}"
            )

        extra = [name for name in self.tensors if name not in shapes and name not in ignored]
        if extra:
            raise UserError(f"{self.path}: tensor {extra[0]} is unexpected{_more(extra)}: the model has no such weight")

        for name, shape in shapes.items():
            stored = self.tensors[name]
            if stored.shape != shape:
                raise UserError(f"{stored.file}: tensor {name} has shape {stored.shape}, expected {shape}")
            if stored.dtype not in FLOATS:
                raise UserError(
                    f"{stored.file}: tensor {name} has type {stored.dtype}, expected one of {', '.join(FLOATS)}"
                )


def open_safetensors(path: Path) -> Weights:
    """Read the headers of a directory or of one `.safetensors` file.

    Raises:
        UserError: if files are missing, damaged or pickles, or a tensor is in several files.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _find(path):
        with _opened(file) as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                if name in tensors:
                    raise UserError(f"{name} is in both {tensors[name].file.name} and {file.name}: remove one")
                piece = f.get_slice(name)
                tensors[name] = StoredTensor(file, piece.get_dtype(), tuple(piece.get_shape()))
    return Weights(path, tensors)


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
        OSError: if the file cannot be written; it contains the path.
    """
    try:
        _write_safetensors(path, tensors, dtype)
    except OSError as e:  # without the path if writing fails after opening
        raise OSError(e.errno, e.strerror, str(path)) from None


def _write_safetensors(path: Path, tensors: Sequence[Tensor], dtype: str) -> None:
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


def as_bytes(size: str) -> int:
    """Convert a size such as 5GB or 500MB to bytes, with 10**9 bytes in a GB, as in transformers.

    Raises:
        UserError: if it is not a positive number with a unit of `SIZES`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B)", size.strip(), re.IGNORECASE)
    number = float(found[1]) * SIZES[found[2].upper()] if found else 0
    if number < 1:
        raise UserError(f"the size of a shard must be a number with KB, MB or GB, such as 5GB: {short_repr(size)}")
    return round(number)


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
    """Return the size of a tensor in a file."""
    return DTYPES[dtype].numpy.itemsize * math.prod(tensor.shape)


def rounded(name: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """Convert a finite float32 tensor to a type of `DTYPES`; raise `UserError` if an element is outside its range."""
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(value, DTYPES[dtype].numpy)
    if dtype != "float32" and not np.isfinite(converted).all():
        largest = float(np.abs(value).max())
        wider = "bfloat16" if dtype == "float16" else "float32"
        raise UserError(
            f"tensor {name} has elements beyond the range of {dtype}: {largest:.3g}; export with --dtype {wider}"
        )
    return converted


def is_gguf(path: Path) -> bool:
    """Return whether a path has the name of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def _find(path: Path) -> list[Path]:
    """Return the safetensors files of a model: one file, or the shards in its directory.

    As in transformers, model.safetensors is the model; otherwise, the files of an index are its shards. Without both, the
    shards are all files in the directory, except copies.
    """
    if path.is_file():
        _check_no_pickle(path)
        return [path]

    files = sorted(path.glob("*.safetensors"))
    if path / SINGLE in files:
        files = [path / SINGLE]
    elif (path / INDEX).is_file():
        return _indexed(path)
    else:
        originals = [file for file in files if not file.match(SECOND_COPY)]
        files = originals or files

    if not files:
        for file in sorted(path.iterdir()):
            _check_no_pickle(file)
        raise UserError(f"{path} has no weights: expected {SINGLE} or other .safetensors files")
    for file in files:
        if not file.exists():
            raise UserError(f"{file} is a link to a missing file, {file.readlink()}: download the model again")
    return files


def _check_no_pickle(file: Path) -> None:
    if file.suffix in PICKLES:
        raise UserError(
            f"{file} is a pickle, which can run code when it is loaded: convert it to safetensors "
            f"with safetensors.torch.save_model or transformers' save_pretrained"
        )


def _indexed(path: Path) -> list[Path]:
    """Return the shards that the index of a directory lists."""
    index = path / INDEX
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{index}: expected an object weight_map of tensors and files: download it again")
    files = [path / name for name in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{path}: {missing[0]} is missing{_more(missing)}: {INDEX} lists it; download the model again")
    return files


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as f:
            yield f
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror or e}") from None
    except SafetensorError as e:
        reason = one_line(e, 200)
        raise UserError(f"{file} is truncated or not a safetensors file ({reason}): download it again") from None


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
