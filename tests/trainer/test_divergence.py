"""Naming the gradient in which training diverged."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.train.step import squared_norms
from jaxgpt.trainer.divergence import first_non_finite


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ([], ""),
        (["h_0/attn/kernel", "wte/embedding"], "h_0/attn/kernel (2 of 6 gradients)"),
        (["h_0/attn/kernel", "h_2/attn/kernel", "h_10/attn/kernel"], "h_10/attn/kernel"),
        (["h_10/attn/kernel", "h_10/mlp/kernel"], "h_10/mlp/kernel"),
        (["h_10/mlp/kernel", "ln_f/scale", "wte/embedding"], "ln_f/scale"),
    ],
)
def test_the_first_bad_gradient_is_named(bad: list[str], name: str) -> None:
    """The backward pass propagates non-finite values from the output towards the input."""
    paths = ["h_0/attn/kernel", "h_10/attn/kernel", "h_10/mlp/kernel", "h_2/attn/kernel", "ln_f/scale", "wte/embedding"]
    grads: dict = {}  # type: ignore[type-arg]
    for path in paths:
        node = grads
        *parents, last = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jnp.array([1.0, jnp.inf if path in bad else 2.0])
    assert name in first_non_finite(grads, np.asarray(squared_norms(grads)))
    assert bool(first_non_finite(grads, np.asarray(squared_norms(grads)))) == bool(bad)
