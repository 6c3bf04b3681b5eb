"""Memory for the temporaries of a step: settings of glibc, and room in the heap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxgpt import heap
from jaxgpt.config import Config
from jaxgpt.parallel import temporaries
from jaxgpt.presets import preset


@pytest.mark.parametrize(
    ("config", "kept"), [(preset("nanogpt-cpu"), False), (preset("python-char"), True), (preset("gpt2"), True)]
)
def test_keep_memory_configures_glibc(config: Config, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, int] = {}
    libc = SimpleNamespace(mallopt=lambda parameter, value: told.update({parameter: value}) or 1)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(temporaries, "cores", lambda: 2)
    temporaries.keep_memory(config)
    assert told == ({heap.M_MMAP_MAX: 0, heap.M_TRIM_THRESHOLD: -1, heap.M_ARENA_MAX: 1} if kept else {})


def test_no_backend_starts_before_memory_is_kept() -> None:
    """Threads of an earlier backend would have their own heaps, which makes steps about 20% slower."""
    code = (
        "from jaxgpt.parallel.host import use_cores; from jaxgpt.parallel.temporaries import keep_memory; "
        "from jaxgpt.presets import preset; "
        "config = preset('python-char'); use_cores(config.mesh, 1, config.model); keep_memory(config); "
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def test_room_for_temporaries_takes_no_memory() -> None:
    """Blocks and walls are never written, so only their addresses are taken."""
    bytes_of_blocks = 2**28
    memory = SimpleNamespace(temp_size_in_bytes=bytes_of_blocks)
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="cpu")]), local_devices=[0])
    compiled: Any = SimpleNamespace(memory_analysis=lambda: memory)
    before = resident_bytes()
    with temporaries.room_for_temporaries(mesh, compiled):
        assert resident_bytes() - before < bytes_of_blocks / 8


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
