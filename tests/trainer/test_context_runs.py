"""Training runs on meshes with the axis `context`: each layout has the losses, gradients and weights of one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from helpers import packed_rows, small

import jaxgpt
from jaxgpt.config import Config, LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.model.scan import unstack_layers

T = 16
STEPS = 2


def train(
    name: str = "modern",
    documents: bool = True,
    optimizer: Any = "sgd",
    rank: int = 0,
    model: dict[str, Any] | None = None,
    mesh: dict[str, int] | None = None,
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
    program = jaxgpt.build(config)
    state = program.init()
    metrics = []
    for step in range(STEPS):
        rows = packed_rows(config.model, 4, step)
        batch = rows if documents else np.concatenate([rows[:, :, 0], rows[:, -1:, 1]], axis=1)
        state, found = program.step(state, program.put(batch))
        metrics.append({name: float(value) for name, value in found.items() if value.ndim == 0})
    losses_B, _ = program.eval(state.params, program.put(batch))
    params = unstack_layers(state.params, config.model.n_layer) if settings.get("scan_layers") else state.params
    return metrics, jax.device_get(params), losses_B.tolist()


EXPECTED: dict[str, Any] = {}  # results on one device, by model and optimizer


def assert_equal_runs(mesh: dict[str, int], settings: dict[str, Any], **changed: Any) -> None:
    """Assert that a run on a mesh with these settings equals a run on one device without them."""
    key = repr(sorted(changed.items()))
    if key not in EXPECTED:
        EXPECTED[key] = train(**changed)
    metrics, params, losses = EXPECTED[key]
    found_metrics, found_params, found_losses = train(mesh=mesh, **changed, **settings)
    for found, expected in zip(found_metrics, metrics, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for a, b in zip(jax.tree.leaves(found_params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)


long = pytest.mark.long
LAYOUTS: list[Any] = [
    ({"context": 2}, {"scan_layers": True, "remat": "full", "attention": "ring"}),
    ({"fsdp": 2, "context": 2, "tensor": 2}, {}),
    pytest.param({"context": 8}, {"loss_chunk": 5}, marks=long),
    pytest.param({"context": 4}, {"attention": "ring"}, marks=long),
    pytest.param({"context": 2}, {"attention": "xla", "loss_chunk": 3}, marks=long),
    pytest.param({"data": 2, "context": 2}, {"remat": "dots", "accumulation": 2}, marks=long),
    pytest.param({"context": 2, "tensor": 4}, {"attention": "ring"}, marks=long),
]


@pytest.mark.parametrize(("mesh", "settings"), LAYOUTS, ids=str)
def test_the_layout_of_a_run_changes_no_loss_and_no_weight(mesh: dict[str, int], settings: dict[str, Any]) -> None:
    """Packed documents, sliding windows and grouped queries."""
    assert_equal_runs(mesh, settings, model={"n_kv_head": 2})


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2", {"context": 4}),
        ("experts", {"expert": 2, "context": 2}),
        pytest.param("torch", {"fsdp": 2, "context": 2}, marks=long),
        pytest.param("llama", {"context": 8}, marks=long),
        pytest.param("gemma", {"context": 2, "fsdp": 2}, marks=long),
        pytest.param("statquest", {"context": 2}, marks=long),
        pytest.param("experts", {"fsdp": 2, "context": 2, "tensor": 2}, marks=long),
    ],
    ids=str,
)
def test_positions_of_every_kind(name: str, mesh: dict[str, int]) -> None:
    """Learned, sinusoidal, rotary and no positions, and experts, on windows without documents."""
    assert_equal_runs(mesh, {}, name=name, documents=False)


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 2},
        pytest.param({"optimizer": "muon"}, marks=long),
        pytest.param({"model": {"dropout": 0.2}}, marks=long),
    ],
    ids=str,
)
def test_adapters_muon_and_dropout(changed: dict[str, Any]) -> None:
    """Dropout draws equal masks, because `auto` then selects the definition."""
    assert_equal_runs({"fsdp": 2, "context": 2}, {}, **changed)
