"""Training runs on meshes with the axis `context`: each layout has the losses, gradients and weights of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import TEXT, flags, packed_rows, small
from helpers import jaxgpt as command

import jaxgpt
from jaxgpt.config import Config, LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.model import GPT
from jaxgpt.model.scan import unstack_layers
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Edit, Visible, attend, row_positions
from jaxgpt.trainer.metrics import read_metrics

T = 16
STEPS = 2


def train(
    name: str = "modern",
    documents: bool = True,
    optimizer: Any = "sgd",
    rank: int = 0,
    model: dict[str, Any] | None = None,
    mesh: dict[str, int] | None = None,
    parts: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[dict[str, float]], Any, list[float]]:
    """Take steps on packed rows; return the metrics of each, the parameters, and the losses of an evaluation by row."""
    config = Config(
        model=small(name, **{"block_size": T, "n_layer": 1, **(model or {})}),
        optim=OptimConfig(name=optimizer, warmup_steps=0, learning_rate=1e-2, min_lr=0.0),
        train=TrainConfig(**{"batch_size": 4, "steps": STEPS, **settings}),
        mesh=MeshConfig(**{"data": 1, **(mesh or {})}),
        lora=LoraConfig(rank=rank),
    )
    program = jaxgpt.build(config, **(parts or {}))
    state = program.init()
    metrics = []
    for step in range(STEPS):
        rows = packed_rows(config.model, 4, step)
        batch = rows if documents else np.concatenate([rows[:, :, 0], rows[:, -1:, 1]], axis=1)
        state, found = program.step(state, program.put(batch))
        metrics.append({name: float(value) for name, value in found.items() if value.ndim == 0})
    losses_B = program.sums(state.params, program.put(batch)).loss_B
    params = unstack_layers(state.params, config.model.n_layer) if settings.get("scan_layers") else state.params
    return metrics, jax.device_get(params), losses_B.tolist()


EXPECTED: dict[str, Any] = {}  # results on one device, by model and optimizer


def assert_equal_runs(mesh: dict[str, int], settings: dict[str, Any], parts: Any = None, **changed: Any) -> None:
    """Assert that a run on a mesh with these settings equals a run on one device without them."""
    key = repr(sorted(changed.items()))
    if key not in EXPECTED:
        EXPECTED[key] = train(**changed)
    metrics, params, losses = EXPECTED[key]
    found_metrics, found_params, found_losses = train(mesh=mesh, parts=parts, **changed, **settings)
    for found, expected in zip(found_metrics, metrics, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for a, b in zip(jax.tree.leaves(found_params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)


ci = pytest.mark.ci
long = pytest.mark.long
LAYOUTS: list[Any] = [
    pytest.param({"context": 2}, {"scan_layers": True, "remat": "full", "attention": "ring"}, marks=ci),
    pytest.param({"fsdp": 2, "context": 2, "tensor": 2}, {}, marks=ci),
    pytest.param({"context": 8}, {"loss_chunk": 5}, marks=long),
    pytest.param({"context": 4}, {"attention": "ring"}, marks=long),
    pytest.param({"context": 4}, {"attention": "gathered"}, marks=long),
    pytest.param({"context": 2}, {"attention": "xla", "loss_chunk": 3}, marks=long),
    pytest.param({"data": 2, "context": 2}, {"remat": "dots", "accumulation": 2}, marks=long),
    pytest.param({"context": 2, "tensor": 4}, {"attention": "ring"}, marks=long),
]


@pytest.mark.parametrize(("mesh", "settings"), LAYOUTS, ids=str)
def test_the_layout_of_a_run_changes_no_loss_and_no_weight(mesh: dict[str, int], settings: dict[str, Any]) -> None:
    """Test packed documents, sliding windows and grouped queries."""
    assert_equal_runs(mesh, settings, model={"n_kv_head": 2})


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param({"context": 2}, {}, marks=long),
        pytest.param({"fsdp": 2, "context": 4}, {"attention": "ring", "remat": "full"}, marks=long),
        pytest.param({"context": 2, "tensor": 2}, {"loss_chunk": 5}, marks=long),
    ],
    ids=str,
)
def test_layers_with_and_without_a_window(mesh: dict[str, int], settings: dict[str, Any]) -> None:
    """Layers with a window receive a halo before each chunk."""
    assert_equal_runs(mesh, settings, model={"n_layer": 2, "sliding_window": 3, "window_pattern": "LG"})


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param("gpt2", {"context": 4}, marks=long),
        pytest.param("experts", {"expert": 2, "context": 2}, marks=ci),
        pytest.param("torch", {"fsdp": 2, "context": 2}, marks=long),
        pytest.param("llama", {"context": 8}, marks=long),
        pytest.param("gemma", {"context": 2, "fsdp": 2}, marks=long),
        pytest.param("statquest", {"context": 2}, marks=long),
        pytest.param("experts", {"fsdp": 2, "context": 2, "tensor": 2}, marks=long),
    ],
    ids=str,
)
def test_positions_of_every_kind(name: str, mesh: dict[str, int]) -> None:
    """Test learned, sinusoidal, rotary and no positions, and experts, on windows without documents."""
    assert_equal_runs(mesh, {}, name=name, documents=False)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"rank": 2}, marks=ci),
        pytest.param({"optimizer": "muon"}, marks=long),
        pytest.param({"model": {"dropout": 0.2}}, marks=long),
    ],
    ids=str,
)
def test_adapters_muon_and_dropout(changed: dict[str, Any]) -> None:
    """Dropout draws equal masks, because `auto` then selects the definition."""
    assert_equal_runs({"fsdp": 2, "context": 2}, {}, **changed)


def attend_by_slot(
    q_BTNH: jax.Array, k_BKSH: jax.Array, v_BKHS: jax.Array, visible: Visible, scale: float, edit: Edit | None = None
) -> jax.Array:
    """Attend by the order of the tokens in the row, as some kernels do."""
    places = row_positions(q_BTNH.shape[1])
    return attend(q_BTNH, k_BKSH, v_BKHS, Visible(places, None, visible.window), scale, edit)


@pytest.mark.parametrize("part", [pytest.param("ops", marks=ci), pytest.param("model", marks=long)])
def test_own_operations_and_models_receive_the_tokens_in_their_order(part: str) -> None:
    ops = Ops(attend=attend_by_slot)
    model = GPT(small("modern", block_size=T, n_layer=1), ops)
    parts = {"ops": ops} if part == "ops" else {"model": model}
    assert_equal_runs({"context": 2}, {}, parts, documents=False)


SETTINGS = flags(
    data__path="text.txt",
    model__n_layer=1,
    model__n_embd=16,
    model__n_head=2,
    model__block_size=16,
    model__positions="rope",
    train__steps=8,
    train__eval_every=4,
    train__log_every=1,
    train__batch_size=4,
    train__sample_tokens=0,
    optim__decay_steps=8,
    mesh__data=1,
)


@pytest.mark.ci
def test_a_run_resumes_on_a_different_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, validation and `eval` on several meshes equal a run on one device."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT[:3000])

    def run(*words: str) -> None:
        result = command("train", *words)
        assert result.code == 0, result.err

    run("shakespeare", "--out", "one", *SETTINGS)
    run("shakespeare", "--out", "two", *SETTINGS, "--mesh.context", "4", "--train.steps", "4")
    run("--resume", "--out", "two", "--train.steps", "8", "--mesh.context", "2", "--mesh.fsdp", "2")
    expected, found = (list(read_metrics(Path(name) / "metrics.jsonl")) for name in ("one", "two"))
    for name in ("loss", "val_loss", "grad_norm"):
        one = {line["step"]: line[name] for line in expected if name in line}
        two = {line["step"]: line[name] for line in found if name in line}
        assert two == pytest.approx(one, rel=1e-5), name
    last = [line["val_loss"] for line in found if "val_loss" in line][-1]
    assert command("eval", "two", "--checkpoint", "last", "--json").json["loss"] == pytest.approx(last, rel=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--mesh.context", "4", "--model.block-size", "36"],
            "model.block_size 36 is not a multiple of 2 x mesh.context 4: use a multiple of 8, or --mesh.context 1",
        ),
        (["--mesh.context", "2", "--data.window", "10"], "data.window 10 is not a multiple of 2 x mesh.context 2: use"),
        (["--mesh.context", "0"], "mesh.context must be at least 1"),
        (["--mesh.context", "2", "--train.attention", "tiled"], "tiled needs complete windows on each device"),
        (
            ["--mesh.context", "2", "--train.attention", "ring", "--model.dropout", "0.1"],
            "ring does not support dropout",
        ),
        (["--train.attention", "gathered"], "gathered needs positions that are divided over devices (mesh.context 2"),
        (
            ["--mesh.context", "16", "--model.block-size", "32"],
            "the mesh needs 16 devices (context 16), but only 8 exist: use --mesh.data -1 --mesh.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_settings_that_do_not_fit_are_one_line(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    result = command("train", "shakespeare", "--out", "run", *SETTINGS, *given)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not Path("run").exists()
