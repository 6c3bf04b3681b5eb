"""With experts, the objectives of preferences, rewards and distillation also minimize the penalties of the routers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small

from jaxgpt.config import Config, OptimConfig, PostConfig
from jaxgpt.model import GPT
from jaxgpt.model.init import init_params
from jaxgpt.post.objective import objective_of
from jaxgpt.train.loss import split_windows

B, T, V = 4, 6, 11
POST = {
    "dpo": PostConfig(objective="dpo"),
    "grpo": PostConfig(objective="grpo", reward=("exact",)),
    "distill": PostConfig(objective="distill", reference="teacher"),
}


def windows() -> jax.Array:
    """Return rows of one document, `[B, T, 3]`; the second half has targets, and the last row is padding."""
    rng = np.random.default_rng(0)
    windows_BT3 = rng.integers(0, V, (B, T, 3)).astype(np.int32)
    windows_BT3[:, : T // 2, 1] = -1
    windows_BT3[..., 2] = 0
    windows_BT3[-1, :, 1:] = -1
    return jnp.asarray(windows_BT3)


def batch_of(objective: str) -> Any:
    if objective == "dpo":
        return windows().reshape(B // 2, 2, T, 3)
    if objective == "distill":
        return windows()
    zeros_BT = jnp.zeros((B, T))
    ones_B = jnp.ones(B)
    return {"windows": windows(), "log_p": zeros_BT, "advantage": ones_B, "weight": ones_B, "metrics": {}}


@pytest.mark.parametrize(
    "objective", ["grpo", pytest.param("dpo", marks=pytest.mark.ci), pytest.param("distill", marks=pytest.mark.ci)]
)
def test_objectives_minimize_the_penalties_of_routers(objective: str) -> None:
    model = small("llama", vocab_size=V, block_size=T, n_layer=1, n_experts=4, router_bias=True)
    optim = OptimConfig(balance_loss=0.3, router_z_loss=0.2)
    config = Config(model=model, optim=optim, post=POST[objective])
    gpt = GPT(model)
    params = jax.jit(partial(init_params, gpt))(0)
    made = objective_of(config, model)(gpt)

    @partial(jax.value_and_grad, has_aux=True)
    def penalty(params: Any) -> tuple[jax.Array, Any]:
        sums = made(params, batch_of(objective), None, params)
        return sums.penalty_B.sum(), sums

    (_, sums), gradients = jax.jit(penalty)(params)

    inputs_BT, targets_BT, positions = split_windows(windows())
    _, sides = jax.jit(partial(gpt.apply, method="hidden_and_sides"))({"params": params}, inputs_BT, None, positions)
    is_target_BT = targets_BT >= 0
    balance_B = jnp.where(is_target_BT.any(1), sides["balance_loss"][:, 0], 0)
    z_B = jnp.where(is_target_BT, sides["router_z_loss"], 0).sum(1) / jnp.maximum(is_target_BT.sum(1), 1)
    penalty_B = 0.3 * balance_B + 0.2 * z_B
    if objective == "dpo":
        penalty_B = penalty_B.reshape(-1, 2).mean(1)
    if objective == "distill":
        penalty_B *= is_target_BT.sum(1)
    np.testing.assert_allclose(sums.penalty_B, penalty_B, rtol=1e-5)
    assert {"balance_loss", "router_z_loss", "largest_load"} <= set(sums.others)
    assert "router_bias" not in sums.others

    # The bias of the routers has a gradient: the errors of the loads.
    assert np.any(gradients["h_0"]["mlp"]["router"]["bias"])
