"""Configs that claim more than their files or memory hold raise before memory is allocated."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import LLAMA, SMALL, hf_folder, run_folder
from helpers import MODELS, small

from jaxgpt.config import ModelConfig
from jaxgpt.convert import llama
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensors import leaf_shapes
from jaxgpt.errors import UserError
from jaxgpt.model.params import count_parameters


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_counted_before_they_are_allocated(name: str, bias: bool) -> None:
    config = small(name, bias=bias and not MODELS[name].n_experts)  # experts have no biases
    exact = sum(int(np.prod(shape)) for shape in leaf_shapes(config).values())
    assert count_parameters(config) == exact
    assert exact / 12 < config.least_parameters <= exact


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_layer": 10**400}, "model.n_layer must be"),
        ({"dropout": 10**400}, "model.dropout must be at least 0 and below 1"),
        ({"n_embd": 2**24}, "13.5 PB|parameters: at most"),
        ({"n_inner": 2**31 - 1, "n_embd": 2**16}, "parameters: at most"),
        ({"n_head": 2**20, "head_dim": 2**16, "n_embd": 2**12}, "parameters: at most"),
        ({"block_size": 2**24, "n_embd": 2**20}, "parameters: at most"),
    ],
)
def test_a_model_larger_than_memory(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig(**settings)  # type: ignore[arg-type]


QWEN = llama.QWEN3.config_to_hf(replace(LLAMA, qk_norm=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**12, "layer_types": None}, "model.n_layer must be"),
        ({"layer_types": [["full_attention"]] * 2}, "layer_types .* must list 2 layers"),
        (
            {"use_sliding_window": True, "sliding_window": "4", "layer_types": ["sliding_attention"] * 2},
            "sliding_window must be an integer: '4'",
        ),
        ({"rope_parameters": [1, 2]}, "rope_parameters must be an object"),
    ],
)
def test_layers_are_counted_not_listed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llama.QWEN3.config_from_hf(Options(QWEN | values, "config.json"))


LITTLE_MEMORY = """
import resource, sys
from jaxgpt.cli import main
import jaxgpt.lm, jaxgpt.convert.import_model, jaxgpt.cli.sample
cases = sys.stdin.read().splitlines()
main(cases[0].split("\\t"))  # what a first command makes once is not counted
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for case in cases:
    print(main(case.split("\\t")), flush=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.ci
def test_claims_allocate_no_memory(tmp_path: Path) -> None:
    """For files that claim terabytes, each command exits with 2 and one line, and all need less than 100 MB."""
    cases = []
    for number, claim in enumerate(({"n_layer": 1024}, {"n_embd": 2**16}, {"vocab_size": 2**24})):
        folder = hf_folder(tmp_path / f"hf-{number}")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | claim))
        cases.append(["import", str(folder), f"run-{number}", "--tokenizer", "ids"])
        run = run_folder(tmp_path / f"run-of-{number}", SMALL)
        saved = json.loads((run / "config.json").read_text())
        saved["model"] |= claim
        (run / "config.json").write_text(json.dumps(saved))
        cases.append(["sample", str(run), "--prompt", "To"])
    for name in ("config.json", "tokenizer.json"):
        run = run_folder(tmp_path / f"large-{name}", SMALL)
        with (run / name).open("r+b") as f:
            f.truncate(2**38)
        cases.append(["sample", str(run), "--prompt", "To"])
    result = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY],
        input="\n".join(map("\t".join, cases)),
        capture_output=True,
        text=True,
        check=True,
    )
    *codes, megabytes = map(int, result.stdout.split())
    assert codes == [2] * len(cases), result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("jaxgpt: ")]
    assert len(lines) == len(cases) + 1, result.stderr
    assert megabytes < 100
