"""Detect token files without a header that were written with a wider type than uint16, such as NumPy's int64."""

from __future__ import annotations

import numpy as np

from jaxgpt.errors import UserError

CHECKED = 1 << 12  # 16-bit values per checked block
CHECKED_BLOCKS = 64  # number of blocks checked in a large file
MIN_NONZERO = 32  # minimum number of nonzero ids for a decision: few 16-bit ids may look like a wider type by chance


def check_raw_ids(ids: np.memmap) -> None:
    """Raise `UserError` if a file without a header, read as uint16, holds ids of a wider type.

    Small ids of a wider integer type have zeros in all 16-bit parts except the lowest, and ids of a floating-point type are
    whole numbers, unlike 16-bit ids of a text. Files with fewer than `MIN_NONZERO` nonzero ids, or with ids at regular places
    among zeros (`_are_ids`), are not rejected.
    """
    kind = _wider_type(_checked_values(ids))
    if not kind:
        return
    raise UserError(
        f"{ids.filename} has no header, so it is read as uint16, but its content looks like {kind}: write 16-bit ids with "
        "numpy.array(ids).astype('uint16').tofile(...), or llm.c's format: a header of 256 int32 (20240520, 1, number of "
        "ids), then the ids as uint16"
    )


def _checked_values(ids: np.memmap) -> np.ndarray:
    """Return evenly spaced blocks of 16-bit values, each at a multiple of 8 bytes, uint16 `[blocks, n]`, n a multiple of 4."""
    if len(ids) <= CHECKED * CHECKED_BLOCKS:
        return np.array(ids[: len(ids) // 4 * 4])[None]
    starts = np.linspace(0, len(ids) - CHECKED, CHECKED_BLOCKS, dtype=np.int64) // 4 * 4
    return np.stack([ids[start : start + CHECKED] for start in starts.tolist()])


def _wider_type(values: np.ndarray) -> str:
    """Return the type of ids that 16-bit values were probably written as, such as `int64`, or "" for uint16."""
    # The high parts of ids below 2^16 are 0. The high parts of padding with -1 or -100 are 0xFFFF.
    for size, kind in ((4, "int64 (the default of numpy.array)"), (2, "int32 or uint32")):
        parts = values.reshape(len(values), -1, size)
        low = parts[..., 0]
        high = parts[..., 1:]
        is_padding = (high == 0xFFFF).all(axis=-1) & (low >= 0x8000)
        is_small = (high == 0).all(axis=-1)
        if (is_small | is_padding).all() and _are_ids(np.where(is_padding, 0, low)):
            return f"ids of {kind}"

    # Floating-point numbers that are integers below 2^24.
    for dtype, kind in (("<f4", "float32"), ("<f8", "float64")):
        numbers = values.view(dtype)
        is_id = np.zeros(numbers.shape, bool)
        is_finite = np.isfinite(numbers)
        is_id[is_finite] = numbers[is_finite] == np.floor(numbers[is_finite])
        is_id &= (numbers >= 0) & (numbers < 2.0**24)
        if is_id.all() and _are_ids(numbers):
            return f"numbers of {kind}"
    return ""


def _are_ids(numbers: np.ndarray) -> bool:
    """Return whether numbers of a wider type `[blocks, n]` are ids, not 16-bit ids at regular places among zeros.

    For example, the 16-bit ids [5, 0, 5, 0] have the same bytes as the 32-bit numbers [5, 5], and the 16-bit ids
    [5, 0, 0, 0, 5, 0, 0, 0] as [5, 0, 5, 0].
    """
    block, index = np.nonzero(numbers)
    if len(index) < MIN_NONZERO:
        return False

    is_same_block = block[1:] == block[:-1]
    distances = np.unique(np.diff(index)[is_same_block]).tolist()
    if distances == [1]:  # no zeros between nonzero numbers: ids, unless all are equal
        return len(np.unique(numbers[block, index])) > 1
    has_irregular_places = len(distances) > 1
    return has_irregular_places
