"""CPU cores as devices, missing platforms, and the faster dtype."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxgpt import cpu, runtime
from jaxgpt.config import MeshConfig
from jaxgpt.parallel import host
from jaxgpt.presets import preset


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


def test_bfloat16_is_advised_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(dtype: str, minor: int, flags: str) -> str:
        monkeypatch.setattr(jax, "__version_info__", (0, minor, 0))
        monkeypatch.setattr(cpu, "cpu_info", lambda: [f"flags\t: {flags}"])
        return host.precision_note(dtype, jax.devices()[0])

    assert "--train.compute-dtype bfloat16" in note("float32", 12, "fpu amx_bf16")
    assert not any(
        (note("bfloat16", 12, "amx_bf16"), note("float32", 10, "amx_bf16"), note("float32", 12, "avx512_bf16"))
    )
