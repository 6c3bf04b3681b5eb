"""The peak rates behind MFU: published for accelerators, stored by bench for a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxgpt.parallel import chips
from jaxgpt.parallel.chips import CHIPS, peak_flops, remember_peak


def mesh_of(platform: str, kind: str, size: int) -> Any:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    return SimpleNamespace(devices=np.array([device] * size), size=size)


@pytest.mark.parametrize(
    ("kind", "flops"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("TPU v5 lite", 197e12), ("TPU v5p", 459e12), ("TPU v6 lite", 918e12),
     ("TPU7x", 1153.5e12), ("NVIDIA GeForce RTX 4090", 0), ("NVIDIA H100 PCIe", 0)],
)  # fmt: skip
def test_the_peak_of_accelerators_is_published(kind: str, flops: float) -> None:
    assert peak_flops(mesh_of("tpu", kind, 4), "float32") == 4 * flops


def test_no_two_chips_have_the_same_kind() -> None:
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert len(kinds) == len(set(kinds)) >= len(CHIPS)


def test_the_peak_of_a_cpu_is_the_highest_one_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of("cpu", "cpu", 2)
    assert peak_flops(mesh, "float32") == 0
    for flops in (1e9, 3e9, 2e9):
        remember_peak("float32", flops)
    assert (peak_flops(mesh, "float32"), peak_flops(mesh, "bfloat16")) == (3e9, 0)
    monkeypatch.setattr(chips, "cores", lambda: 1000)
    assert peak_flops(mesh, "float32") == 0, "measured with fewer cores"
    monkeypatch.undo()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert peak_flops(mesh, "float32") == 0, "of one process"


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": "b"}', b"\xff", b'{"x": NaN}'])
def test_a_damaged_file_of_peaks_is_replaced(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cache").mkdir()
    Path("cache/peaks.json").write_bytes(content)
    assert peak_flops(mesh_of("cpu", "cpu", 1), "float32") == 0
    remember_peak("float32", 5e9)
    assert peak_flops(mesh_of("cpu", "cpu", 1), "float32") == 5e9
    Path("cache").rename("elsewhere")
    Path("cache").write_text("a file")
    remember_peak("float32", 5e9)
    assert Path("cache").read_text() == "a file"
