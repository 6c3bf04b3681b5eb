"""benchmarks/gpu.py: every part runs at toy size on a CPU, and a part that fails or hangs does not stop the others."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import repository

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
    """Run a program as a part."""
    Path("part.py").write_text(program)
    return gpu.run([str(Path("part.py").resolve())], Path("out"), toy)


@pytest.mark.ci
def test_parts_are_saved_and_run_once(
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
        gpu, "parts", lambda toy, text: {name: [str(Path(f"{name}.py").resolve())] for name in programs}
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


def test_a_part_on_a_cpu_beside_a_gpu_fails(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part prints its devices, and sees the first of the visible GPUs."""
    program = (
        "import json, os; print(json.dumps({'devices': {'jax': 'cpu'}, 'gpu': os.environ['CUDA_VISIBLE_DEVICES']}))"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    for name, error in (("", None), ("NVIDIA H100", "computed on a CPU although there is a GPU: jax")):
        monkeypatch.setattr(gpu, "gpu_name", lambda name=name: name)
        found = outcome(gpu, program)
        assert found.get("error") == error
        assert found["partial" if error else "result"]["gpu"] == "3"


@pytest.mark.long
def test_every_part_at_toy_size(gpu: ModuleType) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    result = subprocess.run(
        [sys.executable, SCRIPT, "--out", "out", "--toy"], capture_output=True, text=True, check=True
    )
    outcomes = json.loads(result.stdout.splitlines()[-1])
    assert set(outcomes) == set(gpu.parts(True, ""))
    assert not {name: outcome["output"] for name, outcome in outcomes.items() if "error" in outcome}
    assert not [row for row in outcomes["verify"]["result"].values() if str(row).startswith("FAILS")]
    for name in gpu.TESTS:
        tests = outcomes[name]["result"]
        assert tests["tests"] >= 3
        assert tests["failures"] == tests["errors"] == 0
