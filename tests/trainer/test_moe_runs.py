"""Training runs of a mixture of experts: layouts, balance, biases of routers, adapters."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import make, packed_rows, small

import jaxgpt
from jaxgpt.config import Config, LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.model.scan import unstack_layers

CONFIG = small("experts", block_size=16)
METRICS = ("loss", "grad_norm", "balance_loss", "router_z_loss", "largest_load", "expert_load")


@functools.cache
def three_steps(
    scan: bool = False, remat: Any = "none", accumulation: int = 1, rows: int = 4, **mesh: int
) -> tuple[list[dict[str, Any]], Any]:
    """Train on packed rows; return the metrics of each step, and the weights."""
    config = Config(
        model=CONFIG,
        optim=OptimConfig(
            name="sgd", warmup_steps=0, learning_rate=1e-2, min_lr=0.0, router_z_loss=0.01, balance_loss=0.1
        ),
        train=TrainConfig(batch_size=rows, steps=3, accumulation=accumulation, scan_layers=scan, remat=remat),
        mesh=MeshConfig(**{"data": 1, **mesh}),
    )
    program = jaxgpt.build(config)
    state = program.init()
    metrics = []
    for step in range(3):
        state, found = program.step(state, program.put(packed_rows(CONFIG, rows, step)))
        metrics.append({name: np.asarray(found[name]) for name in METRICS})
    params = unstack_layers(state.params, CONFIG.n_layer) if scan else state.params
    return metrics, jax.device_get(params)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"scan": True, "remat": "full", "accumulation": 2}, marks=pytest.mark.long),
        {"fsdp": 2, "tensor": 2, "accumulation": 2},
        {"fsdp": 2, "expert": 2, "scan": True},
        pytest.param({"expert": 4, "remat": "full"}, marks=pytest.mark.long),
        pytest.param({"remat": "dots"}, marks=pytest.mark.long),
        pytest.param({"data": 2, "scan": True}, marks=pytest.mark.long),
        pytest.param({"rows": 4, "data": 2, "fsdp": 2, "tensor": 2, "remat": "full"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_layout_of_a_run_changes_no_loss_and_no_weight(layout: dict[str, Any]) -> None:
    expected, weights = three_steps()
    found, params = three_steps(**layout)
    for step, metrics in enumerate(found):
        for name, value in metrics.items():
            np.testing.assert_allclose(value, expected[step][name], rtol=2e-5, err_msg=f"{name} of step {step}")
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_biases_of_routers_follow_the_sign_of_the_load_error() -> None:
    config = Config(
        model=CONFIG,
        optim=OptimConfig(warmup_steps=0, router_bias_rate=0.125, weight_decay=0.5),
        train=TrainConfig(batch_size=4, steps=2),
        mesh=MeshConfig(data=1),
    )
    program = jaxgpt.build(config)
    state = program.init()
    before = jax.device_get(state.params["h_0"]["mlp"]["router"]["bias"])
    state, metrics = program.step(state, program.put(packed_rows(CONFIG, 4, 0)))
    assert "router_bias" not in metrics  # its value is always 0
    change_E = np.asarray(state.params["h_0"]["mlp"]["router"]["bias"]) - before
    assert set(np.abs(change_E).tolist()) <= {0.0, 0.125}
    assert change_E.min() < 0 < change_E.max()  # some experts had too many tokens, and others too few


def test_training_evens_out_the_loads() -> None:
    """A router that prefers one expert is trained with a large balance loss only."""
    model = replace(CONFIG, router_bias=False)
    config = Config(
        model=model,
        optim=OptimConfig(warmup_steps=0, learning_rate=3e-2, balance_loss=10.0, schedule="constant"),
        train=TrainConfig(batch_size=8, steps=30),
        mesh=MeshConfig(data=1),
    )
    program = jaxgpt.build(config)
    _, params = make(model)
    kernel_DE = params["h_0"]["mlp"]["router"]["kernel"]
    params["h_0"]["mlp"]["router"]["kernel"] = kernel_DE.at[:, 0].set(0.0).at[0, 0].set(1.0)
    state = program.init(params)
    losses = []
    for step in range(30):
        state, metrics = program.step(state, program.put(packed_rows(CONFIG, 8, step)))
        losses.append(float(metrics["balance_loss"]))
    assert np.mean(losses[-5:]) < min(losses[0], 1.1)


def test_adapters_of_experts_train() -> None:
    config = Config(
        model=CONFIG,
        lora=LoraConfig(rank=2, targets="q_proj,up_proj,router"),
        optim=OptimConfig(warmup_steps=0, learning_rate=1e-2),
        train=TrainConfig(batch_size=4, steps=8),
        mesh=MeshConfig(data=1),
    )
    program = jaxgpt.build(config)
    state = program.init()
    losses = []
    for _ in range(8):
        state, metrics = program.step(state, program.put(packed_rows(CONFIG, 4, 0)))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
