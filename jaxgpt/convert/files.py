"""Read and write safetensors one tensor at a time, so that a model is never in memory twice."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
READ_NUMBERS = 1 << 22  # numbers in a read
LONGEST_NAME = 255  # bytes; file systems report longer names as an error, not as a missing file
FLOATS = ("F32", "F16", "BF16")


class Stored(NamedTuple):
    """The file, type and shape of a tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Weights:
    """The tensors of a directory or of one `.safetensors` file.

    Attributes:
        path: the directory or file.
        tensors: by name.
    """

    def __init__(self, path: Path) -> None:
        """Read headers only.

        Raises:
            UserError: if safetensors are missing or truncated, or an index contradicts its files or leaves the directory.
        """
        self.path = path
        self.tensors: dict[str, Stored] = {}
        files, promised = _find(path)
        for file in files:
            with _opened(file) as f:
                for name in f.keys():  # noqa: SIM118 - not a mapping
                    if name in self.tensors:
                        raise UserError(f"tensor {name} is in both {self.tensors[name].file.name} and {file.name}")
                    piece = f.get_slice(name)
                    self.tensors[name] = Stored(file, piece.get_dtype(), tuple(piece.get_shape()))
        for name, file_name in promised.items():
            if name not in self.tensors or self.tensors[name].file.name != file_name:
                raise UserError(f"tensor {name} is missing: {path / INDEX} lists it in {file_name}")

    def read(self, name: str) -> np.ndarray:
        """Read one tensor as float32.

        Raises:
            UserError: if the tensor contains non-finite numbers.
        """
        stored = self.tensors[name]
        out = np.empty(stored.shape, np.float32)
        for block in _blocks(stored.shape):
            # Opened for each block: the pages that a long-lived mapping has touched count as memory of this process.
            with _opened(stored.file) as f:
                out[block] = f.get_slice(name)[block]
            if not np.isfinite(out[block]).all():
                raise UserError(f"{stored.file}: tensor {name} contains non-finite numbers")
        return out

    def same(self, one: str, other: str) -> bool:
        """Return whether two matrices are equal, compared a block at a time."""
        a, b = self.tensors[one], self.tensors[other]
        if a.shape != b.shape:
            return False
        for block in _blocks(a.shape):
            with _opened(a.file) as f, _opened(b.file) as g:
                if not np.array_equal(f.get_slice(one)[block], g.get_slice(other)[block]):
                    return False
        return True

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignore: Callable[[str], bool]) -> None:
        """Check that exactly the expected tensors exist, with their shapes and types that float32 can represent.

        Raises:
            UserError: if a tensor is missing, unexpected, or of a different shape or type.
        """
        missing = [name for name in shapes if name not in self.tensors]
        if missing:
            raise UserError(
                f"{self.path}: tensor {missing[0]} of shape {shapes[missing[0]]} is missing{_more(missing)}"
            )
        extra = [name for name in self.tensors if name not in shapes and not ignore(name)]
        if extra:
            raise UserError(f"{self.path}: tensor {extra[0]} is unexpected: the model has no such weight{_more(extra)}")
        for name, shape in shapes.items():
            stored = self.tensors[name]
            if stored.shape != shape:
                raise UserError(f"{stored.file}: tensor {name} has shape {stored.shape}, expected {shape}")
            if stored.dtype not in FLOATS:
                raise UserError(
                    f"{stored.file}: tensor {name} has type {stored.dtype}, expected one of {', '.join(FLOATS)}"
                )


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write float32 tensors in the order of `shapes`, with one of them in memory at a time.

    The format: the header's length as 8 bytes, the header as JSON, the numbers (huggingface/safetensors, README).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, value in tensors:
            assert value.shape == shapes[name], name
            assert value.dtype == np.float32, name
            assert value.flags.c_contiguous, name
            assert f.tell() == 8 + len(text) + header[name]["data_offsets"][0], name
            f.write(value.data)
        f.flush()
        os.fsync(f.fileno())


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `target`, which replaces `target` on success and is deleted on failure.

    If `target` is a link, the directory it leads to is replaced.

    Raises:
        UserError: if `target` exists, cannot be written, or has the name of a GGUF file.
    """
    if target.suffix == ".gguf":
        raise UserError(
            f"cannot write a GGUF file: {target}; export to a directory, then run llama.cpp's convert_hf_to_gguf.py"
        )
    if target.name in ("", ".."):
        raise UserError(f"cannot create {target}: choose the path of a new directory")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} already exists: choose another name, or remove it")
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.")
    except OSError as e:
        raise UserError(f"cannot write to {target.parent}: {e.strerror}") from None
    with temporary:
        folder = Path(temporary.name) / target.name
        folder.mkdir()
        yield folder
        try:
            if target.is_dir():
                target.rmdir()
            folder.rename(target)
        except OSError as e:
            raise UserError(f"cannot write {target}: {e.strerror}") from None


def _find(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the safetensors files of a directory, and the file of each tensor by its index."""
    if path.is_file():
        _refuse_pickle(path)
        return [path], {}
    if (path / SINGLE).is_file():
        return [path / SINGLE], {}
    if (path / INDEX).is_file():
        names = read_json(path / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{path / INDEX}: weight_map must map each tensor to a file name")
        for name in names.values():
            if not _is_name(name) or Path(name).name != name or not name.endswith(".safetensors"):
                raise UserError(f"{path / INDEX}: {short_repr(name)} is not a safetensors file in this folder")
        return [path / name for name in sorted(set(names.values()))], names
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files, {}
    if files:
        raise UserError(f"{path} has {len(files)} safetensors files and no {INDEX}: keep the files of one model")
    for file in sorted(path.iterdir()):
        _refuse_pickle(file)
    raise UserError(f"{path} has no weights: expected {SINGLE}, or shards and their {INDEX}")


def _refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLES:
        raise UserError(
            f"{path} is a pickle, which can run code when it is loaded: convert it to safetensors "
            f"with torch (safetensors.torch.save_model, or save_pretrained)"
        )


def _is_name(name: str) -> bool:
    fits = 0 < len(name.encode("utf-8", "replace")) <= LONGEST_NAME
    return fits and "\0" not in name and "\\" not in name and not Path(name).is_absolute()


def refuse_elsewhere(file: Path) -> None:
    """Check that a link leads to the same directory, or to the repository's blobs in the hub's cache.

    Raises:
        UserError: if the link leads outside: a downloaded directory must not read other files of this machine.
    """
    folder, target = file.parent.resolve(), file.resolve().parent
    cached = target.name == "blobs" and folder.parent == target.parent / "snapshots"
    if file.is_symlink() and target != folder and not cached:
        raise UserError(f"{file} is a link to {file.resolve()}, outside its folder: replace it with the file")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise UserError(f"{file} is missing")
    refuse_elsewhere(file)
    try:
        with safe_open(file, "numpy") as f:
            yield f
    except (SafetensorError, OSError) as e:
        reason = one_line(e, 200)
        raise UserError(f"{file} is truncated or not a safetensors file ({reason}): download it again") from None


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    rows = max(1, READ_NUMBERS // max(1, int(np.prod(shape[1:]))))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
