"""benchmarks/gpu.py: every slice runs at toy size on a CPU, and a slice that fails or hangs does not stop the others."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers import repository

from jaxgpt.study import bench

SCRIPT = repository() / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return module


def outcome(gpu: ModuleType, program: str, toy: bool = False) -> dict[str, Any]:
    """Run a program as a slice."""
    Path("slice.py").write_text(program)
    return gpu.run([str(Path("slice.py").resolve())], Path("out"), toy)


@pytest.mark.ci
def test_slices_are_saved_and_run_once(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {
        "good": "print('working'); print('{\"tokens/s\": 7}'); print('{half a line')",
        "bad": "raise SystemExit('out of memory')",
        "silent": "print('no result')",
        "slow": "import time; print('{\"tokens/s\": 5}', flush=True); time.sleep(60)",
    }
    for name, text in programs.items():
        Path(f"{name}.py").write_text(f"open('ran', 'a').write('{name} ');{text}")
    monkeypatch.setattr(
        gpu, "slices", lambda toy, text: {name: [str(Path(f"{name}.py").resolve())] for name in programs}
    )
    monkeypatch.setattr(gpu, "LIMIT", 2)
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", "out"])
        gpu.main()
    out = capsys.readouterr().out.splitlines()
    assert Path("ran").read_text() == "good bad silent slow bad silent slow "
    saved = json.loads(out[-1])
    assert saved["good"]["result"] == {"tokens/s": 7}
    assert saved["bad"]["error"] == "exit code 1: out of memory"
    assert saved["bad"]["output"] == ["out of memory"]
    assert saved["silent"]["error"] == "no JSON: no result"
    assert saved["slow"]["error"] == "timed out after 2 s"
    assert saved["slow"]["partial"] == {"tokens/s": 5}
    assert [line.split() for line in out[-6:-1] if "tokens/s" in line] == [
        ["good", "tokens/s", "7"],
        ["slow", "tokens/s", "5"],
    ]


def test_a_slice_sees_one_gpu_and_its_compiled_programs(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu, "gpu_name", lambda: "")
    env = outcome(gpu, program)["result"]
    assert env["CUDA_VISIBLE_DEVICES"] == "0"
    assert env["JAX_PLATFORMS"] == "cpu", "as in this process"
    cache = Path("out").resolve() / "cache"
    assert (env["JAX_COMPILATION_CACHE_DIR"], env["TORCHINDUCTOR_CACHE_DIR"]) == (f"{cache}/jax", f"{cache}/torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(gpu, "gpu_name", lambda: "NVIDIA H100 80GB HBM3, 570.1, 81559 MiB")
    env = outcome(gpu, program)["result"]
    assert (env["CUDA_VISIBLE_DEVICES"], env["JAX_PLATFORMS"]) == ("3", "cuda,cpu")
    assert outcome(gpu, program, toy=True)["result"]["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("name", "devices", "holds"),
    [
        ("", {"jax": "cpu", "torch": "cpu"}, True),
        ("", {"jax": "cpu", "torch": "NVIDIA H100"}, False),
        ("NVIDIA H100", {"jax": "cpu"}, False),
        ("NVIDIA H100", {"jax": "NVIDIA H100"}, True),
    ],
)
def test_a_slice_on_a_cpu_beside_a_gpu_fails(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, devices: dict[str, str], holds: bool
) -> None:
    monkeypatch.setattr(gpu, "gpu_name", lambda: name)
    found = outcome(gpu, f"import json; print(json.dumps({{'devices': {devices}}}))")
    assert found.get("error") == (None if holds else "on a CPU beside a GPU: jax")
    assert found["result" if holds else "partial"] == {"devices": devices}


def test_a_driver_that_fails_is_no_gpu(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    Path("nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(Path.cwd()), prepend=os.pathsep)
    assert gpu.gpu_name() == ""
    Path("nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H200, 1, 2\necho NVIDIA A10, 1, 2\n")
    assert gpu.gpu_name() == "NVIDIA H200, 1, 2"


def test_pytest_that_cannot_start(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("python").write_text("#!/bin/sh\necho No module named hypothesis\nexit 4\n")
    Path("python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(Path("python").resolve()))
    with pytest.raises(SystemExit, match="pytest wrote no report: No module named hypothesis"):
        gpu.run_tests("tests-ops", False, "")
    assert "No module named" in capsys.readouterr().err


def test_a_trace_that_cannot_be_read_keeps_the_throughput(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*args: Any, **_: Any) -> dict[str, Any]:
        where = bench.device_time(None, {}, 1)
        step = {"tokens_per_second": 5.0, "mfu": 0.5}
        return {"step": step, "where": where, "start_seconds": {"compiled": 3.0}}

    def no_instruction(*_: Any) -> None:
        raise ValueError("no instruction")

    monkeypatch.setattr(bench, "bench", fake)
    monkeypatch.setattr(bench, "device_time", bench.device_time)  # replaced in run_profile, restored by monkeypatch
    monkeypatch.setattr("jaxgpt.study.trace.device_time", no_instruction)
    rows = gpu.run_profile(True, "")
    assert (rows["tokens/s"], rows["no times by kind"]) == (5, "no instruction")
    assert rows["compiled or loaded in seconds"] == 3


def test_batches_are_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    put = importlib.import_module("torch_gpt").put
    batch = MagicMock()
    put(batch, "cuda")
    assert batch.mock_calls == [call.pin_memory(), call.pin_memory().to("cuda", non_blocking=True)]
    batch = torch.zeros(3)
    assert put(batch, "cpu") is batch


SIDE = """
import sys
side = sys.argv[sys.argv.index("--side") + 1]
print("error ImportError: no CUDA library" if side == "transformers" else "a device", flush=True)
for line in sys.stdin:
    if side == "torch" or side.startswith("peak") and line == "0\\n":  # which would import torch beside JAX
        sys.exit(3)
    print(2.0, flush=True)
"""


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_side_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, in_turn: bool) -> None:
    """A side may fail at its start or later: its error is reported, and the other sides are still measured."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    train_step = importlib.import_module("train_step")
    Path("side.py").write_text(SIDE)
    monkeypatch.setattr(train_step, "__file__", "side.py")
    args = argparse.Namespace(nanogpt="", dtype="float32", rounds=2, seconds=0.5, in_turn=in_turn)
    *found, last = train_step.compare("toy", ["jaxgpt", "transformers", "torch", "nanogpt"], args)
    assert list(found[0]["sides"]) == ["jaxgpt"]
    assert list(last["sides"]) == ["jaxgpt", "transformers", "torch", "nanogpt"]
    assert last["sides"]["transformers"] == {"error": "ImportError: no CUDA library"}
    assert last["sides"]["torch"] == {"error": "ended with exit code 3"}
    assert last["sides"]["jaxgpt"] == last["sides"]["nanogpt"]
    assert last["sides"]["jaxgpt"]["milliseconds"] == 2000
    assert set(last["devices"].values()) == {"a device"}


@pytest.mark.parametrize(("cuda", "queued"), [(False, 1), (True, 10)])
def test_a_gpu_has_a_queue_of_sums(monkeypatch: pytest.MonkeyPatch, cuda: bool, queued: int) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    tensor = MagicMock(nbytes=8, is_cuda=cuda)
    importlib.import_module("decode").read_bandwidth(tensor)
    assert tensor.mock_calls == [call.sum()] * queued + [call.sum().item()]


@pytest.mark.ci
@pytest.mark.parametrize(
    "command",
    [
        ["train_step.py", "--shape", "toy", "--rounds", "1", "--seconds", "0.01", "--peers", "transformers", "torch"],
        ["decode.py", "--shape", "toy", "--repeats", "1", "--new", "4", "--kinds", "float32", "--batches", "1"],
    ],
    ids=["train", "decode"],
)
def test_a_peer_that_cannot_be_imported_is_a_row(gpu: ModuleType, command: list[str]) -> None:
    """The others are measured, and each adds its row to the results that are printed."""
    pytest.importorskip("torch")
    Path("transformers.py").write_text("raise ImportError('no CUDA library')")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(repository())])}
    result = subprocess.run(
        [sys.executable, SCRIPT.parent / command[0], *command[1:]], capture_output=True, text=True, check=True, env=env
    )
    *_, first, second, last = (json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    assert "no CUDA library" not in str(first if command[0] == "decode.py" else {})
    assert "ImportError: no CUDA library" in str(second)
    assert second == last
    assert set(last["devices"].values()) == {"cpu"}
    kind = "train" if command[0] == "train_step.py" else "decode"
    table = gpu.table({f"{kind}-toy": {"result": last, "device": "cpu"}})
    assert [("transformers" in line, "ImportError: no CUDA library" in line) for line in table].count((True, True)) == 1
    assert any("jaxgpt" in line and "tokens/s" in line for line in table)


@pytest.mark.long
def test_every_slice_at_toy_size(gpu: ModuleType) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    result = subprocess.run(
        [sys.executable, SCRIPT, "--out", "out", "--toy"], capture_output=True, text=True, check=True
    )
    outcomes = json.loads(result.stdout.splitlines()[-1])
    assert set(outcomes) == set(gpu.slices(True, ""))
    assert not {name: outcome["output"] for name, outcome in outcomes.items() if "error" in outcome}
    assert not [row for row in outcomes["verify"]["result"].values() if str(row).startswith("FAILS")]
    for name in gpu.TESTS:
        tests = outcomes[name]["result"]
        assert tests["tests"] >= 3
        assert tests["failures"] == tests["errors"] == 0


def test_the_peak_is_that_of_the_board(gpu: ModuleType) -> None:
    assert gpu.sheet_peak("NVIDIA H100 80GB HBM3, 570.1, 81559 MiB") == gpu.sheet_peak("NVIDIA H200, 1, 2") == 989e12
    assert gpu.sheet_peak("NVIDIA H100 PCIe, 570.1, 81559 MiB") == gpu.sheet_peak("cpu") == 0
