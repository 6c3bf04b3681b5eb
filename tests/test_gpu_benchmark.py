"""benchmarks/gpu.py: every slice runs at toy size on a CPU, and a slice that fails or hangs does not stop the others."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import repository

SCRIPT = repository() / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.ci
def test_slices_are_saved_and_run_once(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {
        "good": "print('working'); print('{\"tokens/s\": 7}')",
        "bad": "raise SystemExit('out of memory')",
        "silent": "print('no result')",
        "slow": "import time; time.sleep(60)",
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
    assert saved["bad"]["error"] == "exit code 1"
    assert saved["bad"]["output"] == ["out of memory"]
    assert saved["silent"]["error"] == "no JSON in the last line"
    assert saved["slow"]["error"] == "timed out after 2 s"
    assert out[-5].split() == ["good", "tokens/s", "7"]


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
    assert not [row for row in outcomes["verify"]["result"].values() if row.startswith("FAILS")]
    tests = outcomes["tests"]["result"]
    assert tests["tests"] > 3
    assert tests["failures"] == tests["errors"] == 0


def test_the_peak_is_that_of_the_board(gpu: ModuleType) -> None:
    assert gpu.sheet_peak("NVIDIA H100 80GB HBM3, 570.1, 81559 MiB") == gpu.sheet_peak("NVIDIA H200, 1, 2") == 989e12
    assert gpu.sheet_peak("NVIDIA H100 PCIe, 570.1, 81559 MiB") == gpu.sheet_peak("cpu") == 0
