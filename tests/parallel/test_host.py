"""Host memory, CPU cores as devices, and backends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxgpt import cpu, heap, runtime
from jaxgpt.config import Config, MeshConfig
from jaxgpt.parallel import host
from jaxgpt.presets import preset


@pytest.mark.parametrize(
    ("config", "kept"), [(preset("nanogpt-cpu"), False), (preset("python-char"), True), (preset("gpt2"), True)]
)
def test_keep_memory_configures_glibc(config: Config, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, int] = {}
    libc = SimpleNamespace(mallopt=lambda parameter, value: told.update({parameter: value}) or 1)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(host, "cores", lambda: 2)
    host.keep_memory(config)
    assert told == ({host.M_MMAP_MAX: 0, host.M_TRIM_THRESHOLD: -1, host.M_ARENA_MAX: 1} if kept else {})


@pytest.mark.parametrize(
    ("name", "mesh", "processes", "devices"),
    [
        ("python-char", MeshConfig(), 1, 4),
        ("gpt2", MeshConfig(), 1, 1),  # one copy of the weights
        ("gpt2", MeshConfig(data=2), 1, 2),
        ("gpt2", MeshConfig(data=1, fsdp=-1), 1, 4),  # one shard per device
        ("python-char", MeshConfig(data=2, fsdp=4), 1, 8),
        ("python-char", MeshConfig(data=2, fsdp=4), 2, 4),  # each process has half of the devices
        ("python-char", MeshConfig(data=2, fsdp=4), 3, 3),
        ("statquest", MeshConfig(data=1), 1, 1),  # no more devices than the mesh uses
        ("statquest", MeshConfig(data=2_000_000_000), 1, 4),  # not thousands; `resolve` reports it
    ],
)
def test_cores_are_devices(
    name: str, mesh: MeshConfig, processes: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, int] = {}
    for variable in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(host.jax.config, "update", told.__setitem__)
    monkeypatch.setattr(host, "cores", lambda: 4)
    host.use_cores(mesh, processes, preset(name).model)
    assert told == {"jax_num_cpu_devices": devices}


def test_xla_knows_the_options_of_compilation() -> None:
    for platform in ("cpu", "gpu"):
        mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        for options in (host.quick_compile_options(mesh), host.step_compile_options(mesh)):
            assert jax.jit(lambda x: x + 1, compiler_options=options)(1.0) == 2


def test_gpus_compute_the_random_bits_of_unsharded_weights_in_a_kernel() -> None:
    for platform, fsdp, kernels in (("cpu", 1, 0), ("gpu", 1, 1), ("gpu", 2, 0)):
        devices = np.array([SimpleNamespace(platform=platform)])
        shape = {"data": 4, "fsdp": fsdp}
        mesh: Any = SimpleNamespace(devices=devices, shape=shape, size=4 * fsdp)
        with host.random_bits_by_kernel(mesh):
            traced = jax.jit(lambda: jax.random.bits(jax.random.key(0), (8,))).trace()
            assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@cu_threefry2x32") == kernels


@pytest.mark.parametrize(
    ("platforms", "node", "quiet"),
    [(None, "", True), ("tpu", "", False), (None, "accel0", False), (None, "vfio/0", False), (None, "vfio/vfio", True)],
)
def test_libtpu_is_quiet_without_a_tpu(
    platforms: str | None, node: str, quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS")
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    (tmp_path / "vfio").mkdir()
    if node:
        (tmp_path / node).touch()
    monkeypatch.setattr(runtime, "Path", lambda _: tmp_path)
    called: list[bool] = []
    monkeypatch.setattr(runtime, "quiet_libtpu", lambda: called.append(True))
    runtime.skip_missing_tpus()
    assert called == [True] * quiet


@pytest.mark.parametrize("platform", ["cuda", pytest.param("nosuch", marks=pytest.mark.ci)])
def test_a_missing_platform_is_one_line(platform: str) -> None:
    command = [sys.executable, "-m", "jaxgpt", "verify", "statquest"]
    result = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": platform}, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"jaxgpt: JAX_PLATFORMS={platform} cannot be used (")
    assert "Traceback" not in result.stderr


def test_no_backend_starts_before_memory_is_kept() -> None:
    """Threads of an earlier backend would have their own heaps, which makes steps about 20% slower."""
    code = (
        "from jaxgpt.parallel.host import use_cores, keep_memory; from jaxgpt.presets import preset; "
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
    with host.room_for_temporaries(mesh, compiled):
        assert resident_bytes() - before < bytes_of_blocks / 8


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_bfloat16_is_advised_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(dtype: str, minor: int, flags: str) -> str:
        monkeypatch.setattr(jax, "__version_info__", (0, minor, 0))
        monkeypatch.setattr(cpu, "cpu_info", lambda: [f"flags\t: {flags}"])
        return host.precision_note(dtype, jax.devices()[0])

    assert "--train.compute-dtype bfloat16" in note("float32", 12, "fpu amx_bf16")
    assert not any(
        (note("bfloat16", 12, "amx_bf16"), note("float32", 10, "amx_bf16"), note("float32", 12, "avx512_bf16"))
    )
