"""LoRA as a function of weights: no effect at the start, merged equals unmerged, and one A for several matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiled, make, random_ids, small

from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.model.linear import Linear
from jaxgpt.model.lora import init_lora, matrices, merge
from jaxgpt.model.params import flatten_params
from jaxgpt.model.scan import stack_layers, unstack_layers

KEY = jax.random.key(0)


def adapted(name: str, targets: tuple[str, ...], rank: int = 3) -> tuple[GPT, Any, Any]:
    """Return a model, its weights, and adapters whose B is not zero."""
    model, params = make(small(name))
    rng = np.random.default_rng(1)

    def draw(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32)

    adapters = jax.tree.map(draw, init_lora(KEY, params, rank, targets))
    return model, params, adapters


def with_products(model: GPT, params: Any, adapters: Any, alpha: float, ids: jax.Array) -> jax.Array:
    """Compute the logits with two more products per weight, `x W + (alpha / r) (x A) B`; the weights are unchanged."""

    def add(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        y = call(*args, **kwargs)
        if not isinstance(context.module, Linear):
            return y
        *path, name = context.module.path
        node = adapters
        for part in path:
            node = node.get(part, {})
        for target, adapter in node.items():
            if name in target.split("+"):
                a = adapter["a"]
                b = adapter["b"][name]
                y = y + alpha / a.shape[-1] * (args[0] @ a) @ b
        return y

    with nn.intercept_methods(add):
        return compiled(model, params, ids)  # type: ignore[no-any-return]


def every_matrix(name: str) -> tuple[str, ...]:
    _, params = make(small(name))
    return tuple(matrices(params))


def test_fresh_adapters_change_no_bit() -> None:
    model, params = make(small("llama"))
    adapters = init_lora(KEY, params, 3, every_matrix("llama"))
    ids = random_ids(model.config, (2, 9))
    logits = jax.jit(lambda params: model.apply({"params": params}, ids))
    np.testing.assert_array_equal(logits(merge(params, adapters)), logits(params))

    inputs = [leaf for path, leaf in flatten_params(adapters).items() if path.endswith("/a")]
    assert all(np.std(a) > 0.01 for a in inputs)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gpt2", marks=pytest.mark.long), pytest.param("torch", marks=pytest.mark.long)]
)
def test_merged_equals_unmerged(name: str) -> None:
    model, params, adapters = adapted(name, every_matrix(name))
    before = jax.tree.map(np.array, params)
    ids = random_ids(model.config, (2, 9))
    merged = compiled(model, merge(params, adapters, 8.0), ids)
    np.testing.assert_allclose(merged, with_products(model, params, adapters, 8.0, ids), atol=2e-5)
    assert np.abs(merged - compiled(model, params, ids)).max() > 0.1
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_matrices_can_share_one_a() -> None:
    model, params, adapters = adapted("gpt2", ("q_proj+k_proj+v_proj", "down_proj"))
    one = adapters["h_0"]["attn"]["q_proj+k_proj+v_proj"]
    assert one["a"].shape == (16, 3)
    shapes = {name: b.shape for name, b in one["b"].items()}
    assert shapes == {"q_proj": (3, 16), "k_proj": (3, 16), "v_proj": (3, 16)}
    ids = random_ids(model.config, (2, 9))
    merged = jax.jit(model.apply)({"params": merge(params, adapters)}, ids)
    expected = jax.jit(lambda params: with_products(model, params, adapters, 16.0, ids))(params)
    np.testing.assert_allclose(merged, expected, atol=2e-5)


def test_stacked_layers_merge_alike() -> None:
    model, params, adapters = adapted("llama", ("q_proj", "o_proj", "gate_proj"))
    stacked = merge(stack_layers(params), stack_layers(adapters))
    found = unstack_layers(stacked, model.config.n_layer)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), found, merge(params, adapters))


def test_adapters_have_the_logical_axes_of_their_weights() -> None:
    model = GPT(small("llama"))
    adapters = jax.eval_shape(lambda: init_lora(KEY, boxed_params(model, 0), 2, ("q_proj", "o_proj")))
    q = adapters["h_0"]["attn"]["q_proj"]
    o = adapters["h_0"]["attn"]["o_proj"]
    assert (q["a"].names, q["b"]["q_proj"].names) == (("embed", "rank"), ("rank", "heads"))
    assert (o["a"].names, o["b"]["o_proj"].names) == (("heads", "rank"), ("rank", "embed"))


def test_the_first_gradient_is_that_of_b() -> None:
    """At the start the gradient of A is zero, because B is zero."""
    model, params = make(small("llama"))
    adapters = init_lora(KEY, params, 2)
    ids = random_ids(model.config, (2, 9))

    @jax.jit
    @jax.grad
    def gradient(adapters: Any) -> jax.Array:
        logits = model.apply({"params": merge(params, adapters)}, ids)
        return jnp.square(logits).sum()

    is_used = {path.split("/")[-1]: bool(np.any(g)) for path, g in flatten_params(gradient(adapters)).items()}
    assert is_used == {"a": False, "q_proj": True, "v_proj": True}


def test_adapters_of_two_layers_or_matrices_differ() -> None:
    model, params = make(small("llama"))
    adapters = flatten_params(init_lora(KEY, params, 2))
    inputs = [np.asarray(leaf).tobytes() for path, leaf in adapters.items() if path.endswith("/a")]
    assert len(set(inputs)) == 2 * model.config.n_layer


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "q_pro",
            r"no matrix 'q_pro' to adapt \(did you mean q_proj\?\): use one of k_proj, o_proj, q_proj, v_proj, down",
        ),
        ("wte", "no matrix 'wte' to adapt"),
        ("q_proj+o_proj", r"q_proj\+o_proj have different inputs"),
    ],
)
def test_targets_are_checked(target: str, message: str) -> None:
    _, params = make(small("gpt2", head_dim=8))
    with pytest.raises(UserError, match=message):
        init_lora(KEY, params, 2, (target,))


def test_matrices_with_different_input_axes_share_no_a() -> None:
    """Their sizes are equal."""
    model = GPT(small("gpt2"))
    with pytest.raises(UserError, match=r"q_proj\+o_proj have different inputs"):
        jax.eval_shape(lambda: init_lora(KEY, boxed_params(model, 0), 2, ("q_proj+o_proj",)))


@pytest.mark.parametrize("name", ["gpt2", "statquest"])  # a different shape; no MLP
def test_adapters_of_another_model_are_refused(name: str) -> None:
    _, other = make(small("llama", n_embd=32))
    adapters = init_lora(KEY, other, 2, ("q_proj", "gate_proj"))
    _, params = make(small(name))
    with pytest.raises(UserError, match="adapters do not match the model"):
        merge(params, adapters)
