"""Replay of recorded nanoGPT runs."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TEXT, repository
from safetensors.numpy import save_file

from jaxgpt.convert.options import Options

RECORDED = {
    0: (4.1676, 4.1649),
    250: (2.4293, 2.4447),
    500: (2.2732, 2.3141),
    750: (2.1338, 2.1905),
    1000: (1.9714, 2.0528),
    1250: (1.8756, 2.0089),
    1500: (1.8557, 1.9225),
    1750: (1.7790, 1.8921),
    2000: (1.7648, 1.8857),
}


REPLAY = runpy.run_path(str(repository() / "benchmarks" / "replay.py"))
MAIN = REPLAY["main"]


def check(rows: list[dict[str, float]], steps: int) -> None:
    assert [row["step"] for row in rows] == [step for step in RECORDED if step <= steps]
    for row in rows:
        np.testing.assert_allclose((row["train"], row["val"]), RECORDED[row["step"]], atol=5e-4, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("steps", [250, 2000])
def test_nanogpt(data_dir: Path, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert MAIN([str(data_dir / "nanogpt-golden"), "--steps", str(steps), "--json"]) == 0
    check(json.loads(capsys.readouterr().out)["rows"], steps)


D = 8
T = 6
L = 3
V = len(set(TEXT))
RECIPE = {"n_layer": L, "n_head": 2, "n_embd": D, "block_size": T, "bias": True, "dropout": 0.0}
RECIPE |= {"batch_size": 3, "gradient_accumulation_steps": 2, "max_iters": 4, "lr_decay_iters": 4, "warmup_iters": 1}
RECIPE |= {"learning_rate": 1e-2, "min_lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "grad_clip": 1.0}
RECIPE |= {"eval_interval": 2, "eval_iters": 2, "text": "text.txt", "train_fraction": 0.9}


def recording(recipe: dict[str, object] | None = None, drop: str = "", **shapes: tuple[int, ...]) -> str:
    """A recording of a different depth, width and batch, with biases and accumulation."""
    rng = np.random.default_rng(0)
    sizes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (V, D), "transformer.wpe.weight": (T, D)}
    for layer in range(L):
        h = f"transformer.h.{layer}."
        kernels = {"attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "mlp.c_fc": (4 * D, D), "mlp.c_proj": (D, 4 * D)}
        for name, (n_out, n_in) in kernels.items():
            sizes |= {f"{h}{name}.weight": (n_out, n_in), f"{h}{name}.bias": (n_out,)}
        sizes |= {f"{h}{ln}.{part}": (D,) for ln in ("ln_1", "ln_2") for part in ("weight", "bias")}
    sizes |= {"transformer.ln_f.weight": (D,), "transformer.ln_f.bias": (D,)} | shapes
    sizes.pop(drop, None)
    Path("text.txt").write_text(TEXT)
    Path("recipe.json").write_text(json.dumps(RECIPE | (recipe or {})))
    save_file(
        {name: rng.normal(size=size).astype(np.float32) * 0.1 for name, size in sizes.items()}, "init.safetensors"
    )
    evaluation = [0, 0, 1, 1]
    split = [0, *evaluation, 0, 0, 0, 0, *evaluation, 0, 0, 0, 0, *evaluation]
    n = {0: int(0.9 * len(TEXT)), 1: len(TEXT) - int(0.9 * len(TEXT))}
    ix = np.array([rng.integers(0, n[s] - T, 3) for s in split], np.int32)
    np.savez("offsets.npz", split=np.array(split, np.uint8), ix=ix)
    return "."


@pytest.mark.ci
def test_another_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert MAIN([recording(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert rows[0]["train"] > rows[-1]["train"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"drop": "transformer.h.1.mlp.c_fc.bias"}, r"tensor transformer.h.1.mlp.c_fc.bias .*is missing"),
        (
            {"transformer.wpe.weight": (T, D + 1)},
            r"tensor transformer.wpe.weight has shape \(6, 9\), expected \(6, 8\)",
        ),
        ({"transformer.more": (1,)}, "tensor transformer.more is unexpected"),
        ({"recipe": {"eval_iters": 3}}, "draw 3 of the recording is missing or not a training batch"),
    ],
)
def test_an_inconsistent_recording_raises_one_line(
    kwargs: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert MAIN([recording(**kwargs)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1


def test_the_activation_is_nanogpts_exact_gelu() -> None:
    """Four digits of a loss would not show the tanh approximation."""
    assert REPLAY["config_from_recipe"](Options(RECIPE, "recipe.json"), 65).model.activation == "gelu"
