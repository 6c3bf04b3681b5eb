"""Exercise on meshes: product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt_course.exercise import Exercise, normal

Array = np.ndarray


@jax.jit
def product(x_BD: Any, up_PDF: Any, down_PFD: Any, bias_D: Any) -> Any:
    """Compute an MLP sharded over a named `vmap` axis, which simulates the devices, with one all-reduce."""

    def device(up_DF: Any, down_FD: Any) -> Any:
        part_BD = jax.nn.relu(jnp.asarray(x_BD) @ up_DF) @ down_FD
        return jax.lax.psum(part_BD, "tensor") + jnp.asarray(bias_D)[None]

    return jax.vmap(device, axis_name="tensor")(jnp.asarray(up_PDF), jnp.asarray(down_PFD))


def _product(
    combine: Callable[[Array], Array] = lambda parts: np.broadcast_to(parts.sum(0), parts.shape),
    bias: Callable[[Array, int], Array] = lambda bias_D, P: bias_D,
    activate: Callable[[Array], Array] = lambda x: np.maximum(x, 0),
) -> Callable[..., Any]:
    """Make a sharded product, correct by default; an argument adds a deliberate bug."""

    def product(x_BD: Array, up_PDF: Array, down_PFD: Array, bias_D: Array) -> Array:
        parts = activate(x_BD @ up_PDF) @ down_PFD
        return combine(parts) + bias(bias_D, len(parts))

    return product


def _devices_agree(y_PBD: Array, *arguments: Any) -> str | None:
    if not np.allclose(y_PBD, y_PBD[:1], atol=1e-4):
        return "the devices hold different results: after the all-reduce, each device holds the whole sum"
    return None


PRODUCT = Exercise(
    name="product",
    page="mesh",
    aliases=("sharded product",),
    statement="Compute an MLP with hidden units split over P devices (the mesh axis `tensor`): device p holds up_PDF[p] [D, F] "
    "and down_PFD[p] [F, D]; all hold x and the bias. The MLP is relu(x up) down + bias, with all hidden units together. "
    "Return what each device holds after the all-reduce, [P, B, D].",
    returns=("y_PBD",),
    reference=product,
    inputs=lambda: {
        "4 devices": (normal(0, 3, 5), normal(1, 4, 5, 2), normal(2, 4, 2, 5), normal(3, 5)),
        "2 devices": (normal(4, 2, 3), normal(5, 2, 3, 4), normal(6, 2, 4, 3), normal(7, 3)),
        "1 device": (normal(8, 2, 3), normal(9, 1, 3, 4), normal(10, 1, 4, 3), normal(11, 3)),
    },
    mistakes=(
        (
            "the parts are not added: each device holds a part of the sum until the all-reduce",
            _product(lambda parts: parts),
        ),
        (
            "the parts are averaged: the all-reduce adds them",
            _product(lambda parts: np.broadcast_to(parts.mean(0), parts.shape)),
        ),
        (
            "the bias is added on each device before the sum, so it counts P times: add it once, after the sum",
            _product(bias=lambda bias_D, P: P * bias_D),
        ),
        ("the bias is missing: add it once, after the sum", _product(bias=lambda bias_D, P: 0 * bias_D)),
        ("the activation is missing: relu(x up), between the two products", _product(activate=lambda x: x)),
        *(
            (
                "hidden units of different devices are added: they are different units; add only the products with down",
                _product(combine, activate=activate),
            )
            for combine in (lambda parts: np.broadcast_to(parts.sum(0), parts.shape), lambda parts: parts)
            for activate in (
                lambda hidden_PBF: np.maximum(hidden_PBF.sum(0, keepdims=True), 0),
                lambda hidden_PBF: np.maximum(hidden_PBF, 0).sum(0, keepdims=True),
            )
        ),
    ),
    laws=(_devices_agree,),
)
