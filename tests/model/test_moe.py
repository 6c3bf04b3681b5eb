"""A mixture of experts in the model: limits, layouts, counts, adapters, storage and generation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiled, lm_of, make, packed_rows, random_ids, small

import jaxgpt
from jaxgpt.config import Config, ModelConfig, OptimConfig
from jaxgpt.counts import active_count, flops_per_token, multiplied_parameters, parameter_count
from jaxgpt.errors import UserError
from jaxgpt.kernels import best
from jaxgpt.kernels.stored import Stored
from jaxgpt.lm.weights import quantize
from jaxgpt.model import GPT
from jaxgpt.model.params import abstract_params, count_parameters
from jaxgpt.ops.attention import document_positions
from jaxgpt.train.loss import next_token_loss
from jaxgpt.train.side_outputs import router_penalties

CONFIG = small("experts", block_size=16)


def test_one_expert_is_an_mlp() -> None:
    """With E = A = 1, the share is 1, and the expert computes every token."""
    one = replace(CONFIG, n_experts=1, experts_per_token=1, shared_experts=0, router_scale=1.0, router_bias=False)
    dense = replace(one, n_experts=0)
    _, params = make(one)
    mlp_params = jax.tree.map(lambda x: x, params)
    for layer in range(CONFIG.n_layer):
        mlp = dict(mlp_params[f"h_{layer}"]["mlp"])
        del mlp["router"]
        mlp_params[f"h_{layer}"]["mlp"] = {name: {"kernel": kernel["kernel"][0]} for name, kernel in mlp.items()}
    ids = random_ids(CONFIG, (2, 12))
    found = compiled(GPT(one), params, ids)
    np.testing.assert_allclose(found, compiled(GPT(dense), mlp_params, ids), atol=2e-5)


def test_the_order_of_the_experts_does_not_matter() -> None:
    model, params = make(CONFIG)
    order = np.asarray([2, 0, 3, 1])
    moved = jax.tree.map(lambda x: x, params)
    for layer in range(CONFIG.n_layer):
        mlp = moved[f"h_{layer}"]["mlp"]
        for name in ("up_proj", "gate_proj", "down_proj"):
            mlp[name] = {"kernel": mlp[name]["kernel"][order]}
        router = mlp["router"]
        mlp["router"] = {"kernel": router["kernel"][:, order], "bias": router["bias"][order]}
    ids = random_ids(CONFIG, (2, 12))
    found = compiled(model, moved, ids)
    np.testing.assert_allclose(found, compiled(model, params, ids), atol=2e-5)


def test_the_penalty_is_not_part_of_the_loss() -> None:
    config = Config(model=CONFIG, optim=OptimConfig(balance_loss=0.5, router_z_loss=0.25))
    model, params = make(CONFIG)
    windows = jnp.asarray(packed_rows(CONFIG, 3, 0))
    penalized = next_token_loss(model.apply, penalties=router_penalties(config))
    with_penalty = jax.jit(partial(penalized, key=None))(params, windows)
    without = jax.jit(partial(next_token_loss(model.apply), key=None))(params, windows)
    np.testing.assert_allclose(with_penalty.loss_B, without.loss_B, rtol=1e-6)
    sums = with_penalty.others
    expected_B = 0.5 * sums["balance_loss"] + 0.25 * sums["router_z_loss"]
    np.testing.assert_allclose(with_penalty.penalty_B, expected_B, rtol=1e-6)


def test_padding_changes_no_side_output_of_a_row() -> None:
    """The gradient of the biases of routers does not change either."""
    model, params = make(CONFIG)
    rows = packed_rows(CONFIG, 2, 0)
    document = jnp.asarray(rows[..., 2])
    inputs = jnp.maximum(jnp.asarray(rows[..., 0]), 0)
    changed = inputs.at[:, 12:].set(3)
    positions = document_positions(document)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def compute(params: Any, inputs: jax.Array) -> Any:
        _, sides = model.apply({"params": params}, inputs, None, positions, method="hidden_and_sides")
        return sides["router_bias"].sum(), sides

    gradient, sides = compute(params, inputs)
    other_gradient, others = compute(params, changed)
    assert sides["expert_load"].shape == (2, 1, CONFIG.n_layer, 4)
    for name in ("balance_loss", "largest_load", "expert_load"):
        np.testing.assert_allclose(sides[name], others[name], rtol=1e-6)
    for layer in range(CONFIG.n_layer):
        found, expected = (each[f"h_{layer}"]["mlp"]["router"]["bias"] for each in (other_gradient, gradient))
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_counts() -> None:
    """Two of four experts of each stack are active."""
    params = abstract_params(CONFIG)
    stack = CONFIG.n_layer * 3 * 4 * 16 * 8
    assert parameter_count(params) - active_count(CONFIG, params) == stack // 2
    everything = replace(CONFIG, experts_per_token=4)
    assert multiplied_parameters(everything, params) - multiplied_parameters(CONFIG, params) == stack // 2
    assert flops_per_token(everything, params, 16) - flops_per_token(CONFIG, params, 16) == 6 * stack // 2
    assert count_parameters(CONFIG) == parameter_count(params)


def test_int8_keeps_the_router() -> None:
    _, params = make(CONFIG)
    stored = quantize(params, CONFIG, "int8")["h_0"]["mlp"]
    assert isinstance(stored["up_proj"]["kernel"], Stored)
    assert stored["router"]["kernel"] is params["h_0"]["mlp"]["router"]["kernel"]


def test_generation_from_stored_weights_equals_that_of_arrays() -> None:
    lm = lm_of("experts")
    arrays = jaxgpt.generate(lm, [1, 2, 3], max_new_tokens=8, temperature=0.0)
    stored_lm = lm._replace(params=quantize(lm.params, lm.config.model, "float32"))
    stored = jaxgpt.generate(stored_lm, [1, 2, 3], max_new_tokens=8, temperature=0.0)
    assert arrays[0].ids == stored[0].ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp": "none"}, "needs an MLP"),
        ({"bias": True}, "set model.bias to false"),
        ({"experts_per_token": 5}, "exceeds model.n_experts 4"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **changes)


def test_huge_experts_are_refused_before_they_are_traced() -> None:
    with pytest.raises(UserError, match="parameters"):
        ModelConfig(bias=False, n_experts=2**16, n_embd=2**14, n_inner=2**24)


def test_the_best_operations_of_a_cpu_compute_the_model() -> None:
    model, params = make(CONFIG)
    ids = random_ids(CONFIG, (2, 12))
    fast = GPT(CONFIG, best(Config(model=CONFIG)))
    np.testing.assert_allclose(fast.apply({"params": params}, ids), model.apply({"params": params}, ids), atol=2e-5)
