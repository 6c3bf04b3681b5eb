"""The device groups of collectives in HLO text: their devices, and the axes of the mesh along which they communicate."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")


def group_of(line: str, devices: int) -> list[int]:
    """Return the numbers of the devices in the first group of a collective, from any of XLA's notations.

    Notations are `{{0,1},{2,3}}`; `{}`, all `devices` of the program; `[2,2]<=[4]` with an optional transposition `T(1,0)`;
    `mesh['a'=2,'b'=4] {'b'}`, with split axes such as `'a':(1)2`; and `source_target_pairs={{0,1},{1,0}}`, all devices of
    the pairs.

    Raises:
        ValueError: if the line has none of these notations.
    """
    pairs = _PAIRS.search(line)
    if pairs:
        return sorted(set(_integers(pairs[1])))

    _, _, text = line.partition("replica_groups=")
    if text.startswith("{}"):
        return list(range(devices))
    listed = re.match(r"\{\{([\d,]+)\}", text)
    if listed:
        return _integers(listed[1])
    grid = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if grid:
        groups = _arranged(grid[2], grid[3]).reshape(_integers(grid[1]))
        return [int(each) for each in groups[0]]
    mesh = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        numbers = _arranged(mesh[2] or str(math.prod(sizes.values())), mesh[3]).reshape(list(sizes.values()))
        return _along(numbers, sizes, mesh[4])
    raise ValueError(f"unknown syntax of a device group: {text[:80]!r}")


def _arranged(shape: str, order: str | None) -> np.ndarray:
    """Return the numbers from 0 in an array of this shape, transposed by `order`."""
    sizes = _integers(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_integers(order)) if order else numbers


def _along(numbers: np.ndarray, sizes: Mapping[str, int], names: str) -> list[int]:
    """Return the devices along some axes of a mesh, at index 0 of all other axes.

    For example, `'a':(2)4` is the middle axis after the axis a is split into 2, 4 and the remainder.
    """
    wanted = {name: (before, part) for name, before, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", names)}
    shape = list[int]()
    chosen = list[int | slice]()
    for name, size in sizes.items():
        before, part = wanted.get(name, ("1", "1"))
        first = int(before or 1)
        middle = int(part or size)
        shape += [first, middle, size // (first * middle)]
        chosen += [0, slice(None), 0]
    return [int(each) for each in numbers.reshape(shape)[tuple(chosen)].reshape(-1)]


def _integers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]


def axes_of(line: str, group: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a mesh along which the devices of a collective differ; () if the mesh has too few devices.

    For a permutation, these are the axes along which its sources differ from their targets. `mesh` has the size of each axis.
    """
    shape = tuple(mesh.values())
    pairs = _PAIRS.search(line)
    ends = [group]
    if pairs:
        numbers = _integers(pairs[1])
        ends = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
    found = set[str]()
    for each in ends:
        if max(each, default=0) >= math.prod(shape):
            return ()
        places = np.unravel_index(np.asarray(each), shape)
        found |= {name for name, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1}
    return tuple(name for name in mesh if name in found)
