"""Weights of a model in safetensors files, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.errors import UserError, one_line
from jaxgpt.files import read_json

SINGLE = "model.safetensors"
SECOND_COPY = "consolidated*"  # glob pattern of Mistral's own weight files, duplicates of the transformers files
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FLOATS = ("F32", "F16", "BF16")
INDEX = f"{SINGLE}.index.json"


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
        """Read one tensor as float32, unchecked; a subclass overrides this function."""
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
                f"{self.path}: tensor {missing[0]} of shape {shapes[missing[0]]} is missing{_more(missing)}: download it again"
            )

        extra = [name for name in self.tensors if name not in shapes and name not in ignored]
        if extra:
            raise UserError(f"{self.path}: tensor {extra[0]} is unexpected{_more(extra)}: the model has no such weight")

        for name, shape in shapes.items():
            stored = self.tensors[name]
            if stored.shape != shape:
                raise UserError(
                    f"{stored.file}: tensor {name} has shape {stored.shape}, expected {shape}: the config does not match"
                )
            if stored.dtype not in FLOATS:
                raise UserError(
                    f"{stored.file}: tensor {name} has type {stored.dtype}: convert it to one of {', '.join(FLOATS)}"
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


def is_gguf(path: Path) -> bool:
    """Return whether a path has the name of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def _find(path: Path) -> list[Path]:
    """Return the safetensors files of a model: one file, or the shards in its directory.

    As in transformers, model.safetensors is the model; otherwise, the files of an index are its shards. Without both, the
    shards are all safetensors files in the directory, except copies.
    """
    if path.is_file():
        _check_no_pickle(path)
        return [path]

    single = path / SINGLE
    files = sorted(path.glob("*.safetensors"))  # including links to missing files
    if single in files:
        files = [single]
    elif (path / INDEX).is_file():
        return _indexed(path)
    else:
        without_copies = [file for file in files if not file.match(SECOND_COPY)]
        if without_copies:  # otherwise, the directory has only Mistral's own files
            files = without_copies

    if not files:
        for file in sorted(path.iterdir()):
            _check_no_pickle(file)
        raise UserError(f"{path} has no weights: expected {SINGLE} or other .safetensors files")
    for file in files:
        if not file.exists():
            raise UserError(f"{file} is a link to a missing file, {file.readlink()}: download the model again")
    return files


def _check_no_pickle(file: Path) -> None:
    """Raise `UserError` if a file has the name of a pickle."""
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
    """Open a safetensors file; raise `UserError` if it cannot be read."""
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
    """Return the number of names after the first for an error, or ""."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
