"""The device groups of collectives in HLO text: their devices, and the axes of the mesh along which they communicate.

XLA writes the devices of a collective as replica groups, or as pairs of a source and a target:

    replica_groups={{0,1},{2,3}}                  lists
    replica_groups={}                             all devices
    replica_groups=[2,2]<=[4]                     rows of the array [[0, 1], [2, 3]]
    replica_groups=[2,2]<=[2,2]T(1,0)             rows of its transpose [[0, 2], [1, 3]]
    replica_groups=mesh['a'=2,'b'=4] {'b'}        the devices along the axis b of a mesh
    source_target_pairs={{0,1},{1,0}}             a permutation
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
_LISTS = re.compile(r"\{\{(?P<first>[\d,]+)\}")

# Numbers from 0 in an array, transposed by `order`, if present: `[2,4]T(1,0)`.
_ARRANGED = r"\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
_ROWS = re.compile(rf"\[(?P<rows>[\d,]+)\]<={_ARRANGED}")  # [4,2]<=[2,4]T(1,0)

# mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}; without `device_ids`, the devices are in order.
_MESH = re.compile(
    rf"""
    mesh\[(?P<sizes>[^\]]*)\]             # 'a'=2,'b'=4
    (?:,\ device_ids=\({_ARRANGED}\))?    # , device_ids=([2,4]T(1,0))
    \ \{{(?P<axes>[^}}]*)\}}               # {{'b'}}
    """,
    re.VERBOSE,
)
_SIZE = re.compile(r"'(?P<axis>[^']*)'=(?P<size>\d+)")  # 'a'=8
_CHOSEN_AXIS = re.compile(r"'(?P<axis>[^']*)'(?::\((?P<before>\d+)\)(?P<size>\d+))?")  # 'a', or a part of it: 'a':(2)4


class DeviceGroup(NamedTuple):
    """The devices of a collective.

    Attributes:
        devices: numbers of the devices in the first group; for a permutation, of all its devices, in ascending order.
        pairs: source and target of each transfer of a permutation; (): not a permutation.
    """

    devices: list[int]
    pairs: tuple[tuple[int, int], ...] = ()

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Return the axes of a mesh along which the devices differ; for a permutation, along which any pair differs.

        `mesh` has the size of each axis. The result is () if the mesh has too few devices.
        """
        shape = tuple(mesh.values())
        if max(self.devices, default=0) >= math.prod(shape):
            return ()

        differing = set[str]()
        for devices in self.pairs or (self.devices,):
            coordinates = np.unravel_index(np.array(devices, int), shape)  # an array of all devices for each axis
            differing |= {axis for axis, x in zip(mesh, coordinates, strict=True) if len(np.unique(x)) > 1}
        return tuple(axis for axis in mesh if axis in differing)


def read_group(line: str, devices: int) -> DeviceGroup:
    """Read the devices of a collective from its line; `devices` is the number of devices of the program.

    Raises:
        ValueError: if the line has none of XLA's notations.
    """
    pairs = _PAIRS.search(line)
    if pairs:
        numbers = _integers(pairs[1])
        return DeviceGroup(sorted(set(numbers)), tuple(zip(numbers[::2], numbers[1::2], strict=True)))
    _, _, text = line.partition("replica_groups=")
    return DeviceGroup(_first_group(text, devices))


def _first_group(text: str, devices: int) -> list[int]:
    """Return the devices in the first of the replica groups at the beginning of a text."""
    if text.startswith("{}"):
        return list(range(devices))
    lists = _LISTS.match(text)
    if lists:
        return _integers(lists["first"])
    rows = _ROWS.match(text)
    if rows:
        groups = _arranged(rows).reshape(_integers(rows["rows"]))
        return [int(number) for number in groups[0]]
    mesh = _MESH.match(text)
    if mesh:
        return _along_axes(mesh)
    raise ValueError(f"unknown syntax of a device group: {text[:80]!r}")


def _along_axes(mesh: re.Match[str]) -> list[int]:
    """Return the devices along the axes of a match of `_MESH`, at index 0 of all other axes.

    A part of an axis is written with the size of what precedes it: for `'a'=16`, `'a':(2)4` is the middle axis of `[2, 4, 2]`.
    """
    sizes = {found["axis"]: int(found["size"]) for found in _SIZE.finditer(mesh["sizes"])}
    chosen = {found["axis"]: found for found in _CHOSEN_AXIS.finditer(mesh["axes"])}

    # Split each axis into three, and take the middle one:
    #     'a':(2)4 of 'a'=16     shape [2, 4, 2], index [0, :, 0]
    #     not chosen, 'b'=4      shape [1, 1, 4], index [0, :, 0]
    shape = list[int]()
    index = list[int | slice]()
    for axis, size in sizes.items():
        before = 1
        part = 1
        if axis in chosen:
            before = int(chosen[axis]["before"] or 1)
            part = int(chosen[axis]["size"] or size)
        shape += [before, part, size // (before * part)]
        index += [0, slice(None), 0]

    numbers = _arranged(mesh) if mesh["shape"] else np.arange(math.prod(sizes.values()))
    return [int(number) for number in numbers.reshape(shape)[tuple(index)].reshape(-1)]


def _arranged(match: re.Match[str]) -> np.ndarray:
    """Return the array that `_ARRANGED` describes."""
    shape = _integers(match["shape"])
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(_integers(match["order"])) if match["order"] else numbers


def _integers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]
