"""The published peak rates behind MFU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxgpt.parallel.chips import CHIPS, peak_flops


def mesh_of(platform: str, kind: str, size: int) -> Any:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    return SimpleNamespace(devices=np.array([device] * size), size=size)


@pytest.mark.parametrize(
    ("kind", "flops"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("TPU v5 lite", 197e12), ("TPU v5p", 459e12), ("TPU v6 lite", 918e12),
     ("TPU7x", 1153.5e12), ("NVIDIA GeForce RTX 4090", 0), ("NVIDIA H100 PCIe", 0), ("cpu", 0)],
)  # fmt: skip
def test_the_peak_of_accelerators_is_published(kind: str, flops: float) -> None:
    assert peak_flops(mesh_of("tpu", kind, 4)) == 4 * flops


def test_no_two_chips_have_the_same_kind() -> None:
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert len(kinds) == len(set(kinds)) >= len(CHIPS)
