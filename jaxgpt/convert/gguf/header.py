"""Headers of GGUF files: metadata and tensor locations, in one file or in all parts of a split file.

The gguf package of llama.cpp reads the header. Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.errors import UserError, short_repr

PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
MERGE = "merge them with llama-gguf-split --merge"


class Header(NamedTuple):
    """The header of one file."""

    file: Path
    metadata: dict[str, Any]
    tensors: list[Any]  # `gguf.ReaderTensor`s with memory-mapped data


def read_headers(path: Path) -> list[Header]:
    """Read the header of a file, or of all parts of a split file in order.

    Raises:
        UserError: if a file is missing or malformed, or the gguf package is missing.
    """
    given = _read_header(path)
    parts = _parts(path, given.metadata)
    if len(parts) == 1:
        return [given]
    headers = []
    for number, part in enumerate(parts):
        header = given if part == path else _read_header(part)
        _check_part(part, header.metadata, number, len(parts))
        headers.append(header)
    return headers


def _parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """Return the paths of all parts of a split file, in order, or the path of the only file."""
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count < 10**5:
        raise UserError(f"{path}: split.count must be an integer below 100,000: {short_repr(count)}")
    if count < 2:
        return [path]
    named = PART.fullmatch(path.name)
    if named is None or int(named[2]) != count:
        raise UserError(
            f"{path} is one of {count} parts of a model: rename the parts to NAME-00001-of-{count:05}.gguf, or {MERGE}"
        )
    parts = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise UserError(
            f"{path} is one of {count} parts of a model, and {missing[0].name} is missing: put all parts in one directory"
        )
    return parts


def _check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Raise `UserError` if a file is not the part that its name specifies."""
    found = metadata.get("split.no"), metadata.get("split.count")
    if found != (number, count):
        raise UserError(
            f"{path}: split.no {short_repr(found[0])} and split.count {short_repr(found[1])} must be {number} and {count}, "
            f"as in its name: download it again"
        )


def _read_header(path: Path) -> Header:
    """Read the header of a file. Raises `UserError` for a malformed file, or a missing gguf package."""
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF files need the gguf package: pip install 'jaxgpt[gguf]'") from None

    class Reader(gguf.GGUFReader):
        """A reader that rejects a truncated file; gguf's reader returns shorter arrays."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> np.ndarray:
            array: np.ndarray = super()._get(offset, dtype, count, *order, **named)
            if len(array) < count:
                raise ValueError("the file is truncated")
            return array

    try:
        with np.errstate(over="raise"):
            reader = Reader(path)
            metadata = {name: _value(field, gguf.GGUFValueType.FLOAT32) for name, field in reader.fields.items()}
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from None
    except (ValueError, LookupError, ArithmeticError, RecursionError) as e:
        raise UserError(f"{path} is damaged, or not a GGUF file: {short_repr(str(e))}; download it again") from None
    if reader.byte_order != "I":
        raise UserError(f"{path} is big-endian: convert it to little-endian")
    _check_offsets(path, reader)
    return Header(path, metadata, reader.tensors)


def _check_offsets(path: Path, reader: Any) -> None:
    """Raise `UserError` if tensors are not contiguous: llama.cpp rejects the file, and wrong offsets give wrong values."""
    alignment = int(reader.alignment)  # an unsigned NumPy integer if the file sets it
    expected = 0
    for tensor in reader.tensors:
        offset = tensor.data_offset - reader.data_offset
        if offset != expected:
            raise UserError(
                f"{path}: tensor {tensor.name} has the offset {offset:,}, expected {expected:,}: the file is damaged, download "
                f"or convert it again"
            )
        blocks = -(-int(tensor.n_bytes) // alignment)  # rounded up
        expected += blocks * alignment


def _value(field: Any, float32: Any) -> Any:
    """Return a metadata value; a float32 becomes the shortest decimal number: 1e-05, not 9.999999747378752e-06."""
    value = field.contents()
    if field.types[0] == float32:
        return float(str(np.float32(value)))
    return value
