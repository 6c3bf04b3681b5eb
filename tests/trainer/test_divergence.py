"""Naming the gradient in which training diverged."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small

from jaxgpt.config import ModelConfig
from jaxgpt.model.gpt import GPT
from jaxgpt.model.lora import init_lora
from jaxgpt.model.params import abstract_params, flatten_params
from jaxgpt.model.scan import stack_layers
from jaxgpt.ops import Ops
from jaxgpt.train.step import squared_norms
from jaxgpt.trainer.divergence import first_non_finite

WORDS = "first in the backward pass in the gradient of"


@jax.custom_vjp
def nan_gradient(x: jax.Array) -> jax.Array:
    return x


nan_gradient.defvjp(lambda x: (x, None), lambda _, dy: (dy * jnp.nan,))


def phrase(model: ModelConfig, trained: Any, bad: tuple[str, ...]) -> str:
    return first_non_finite(model, trained, [np.nan if name in bad else 1.0 for name in flatten_params(trained)])


@pytest.mark.parametrize(
    ("module", "name", "settings", "first"),
    [
        ("h_1/mlp", "post", {}, "h_1/mlp/up_proj"),
        ("h_0", "attn.out", {}, "h_0/attn/o_proj"),
        ("h_1/attn", "head_out", {}, "h_1/attn/v_proj"),
        ("h_1/attn", "q", {}, "h_1/attn/q_proj"),
        ("h_1/ln_2", "out", {}, "h_1/ln_2"),
        ("h_0", "resid.mid", {"norm_position": "pre"}, "h_0/attn/o_proj"),
        ("h_0", "resid.mid", {"norm_position": "post"}, "h_0/ln_1"),
        ("h_0", "resid.mid", {"norm_position": "output"}, "h_0/ln_1_out"),
        ("h_1", "resid.post", {"mlp": "gated"}, "h_1/mlp/down_proj"),
        ("ln_f", "out", {}, "ln_f"),
    ],
)
def test_the_first_bad_gradient_is_named(module: str, name: str, settings: dict[str, Any], first: str) -> None:
    """A NaN gradient of an activation first affects the weight that is used last before the activation."""
    model = small("gpt2", **{"tie_embeddings": False, "n_layer": 2, "bias": True} | settings)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(0, 0.1, s.shape).astype(s.dtype), abstract_params(model))

    def edit(path: str, x: jax.Array) -> jax.Array:
        return nan_gradient(x) if path == f"{module}/{name}" else x

    def loss(params: Any) -> jax.Array:
        return GPT(model, Ops(edit=edit)).apply({"params": params}, jnp.arange(4)[None]).var()  # type: ignore[union-attr]

    squares = squared_norms(jax.grad(loss)(params)).tolist()
    assert first_non_finite(model, params, squares).startswith(f"{WORDS} {first}/")


@pytest.mark.parametrize(
    ("bad", "first"),
    [
        (("h_2/attn/q_proj/kernel", "h_10/attn/q_proj/kernel", "wte/embedding"), "h_10/attn/q_proj/kernel"),
        (("lm_head/kernel", "ln_f/scale", "h_10/mlp/up_proj/kernel"), "lm_head/kernel"),
    ],
)
def test_layers_are_ordered_by_number(bad: tuple[str, ...], first: str) -> None:
    model = small("gpt2", n_layer=11, tie_embeddings=False)
    params = abstract_params(model)
    assert phrase(model, params, bad) == f"{WORDS} {first} ({len(bad)} of {len(flatten_params(params))} gradients)"
    assert phrase(model, params, tuple(flatten_params(params))) == "and no gradient is finite"
    assert not phrase(model, params, ())


@pytest.mark.parametrize(
    ("bad", "first"),
    [
        (("attn/o_proj/a", "attn/o_proj/b/o_proj", "attn/q_proj+k_proj+v_proj/a"), "attn/o_proj/b/o_proj"),
        (("attn/q_proj+k_proj+v_proj/b/k_proj", "attn/q_proj+k_proj+v_proj/a"), "attn/q_proj+k_proj+v_proj/b/k_proj"),
        (("mlp/down_proj/a", "attn/o_proj/b/o_proj"), "mlp/down_proj/a"),
    ],
)
def test_adapters_have_the_places_of_their_weights(bad: tuple[str, ...], first: str) -> None:
    model = small("gpt2", n_layer=2)
    targets = ("q_proj+k_proj+v_proj", "o_proj", "down_proj")
    adapters = jax.eval_shape(lambda params: init_lora(jax.random.key(0), params, 2, targets), abstract_params(model))
    for layers, name in ((adapters, "h_1"), (jax.eval_shape(stack_layers, adapters), "h")):
        found = phrase(model, layers, tuple(f"{name}/{each}" for each in bad))
        assert found.startswith(f"{WORDS} {name}/{first} ({len(bad)} of ")
