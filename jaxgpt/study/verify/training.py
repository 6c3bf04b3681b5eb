"""Laws of gradients: recomputed, in pieces, over devices, compiled; and XLA's own hazard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxgpt.config import Config, MeshConfig, OptimConfig, UserError
from jaxgpt.model import GPT
from jaxgpt.model.scan import stack_layers, unstack_layers
from jaxgpt.parallel import resolve
from jaxgpt.parallel.mesh import AXES
from jaxgpt.study.verify.subject import ROWS, STEPS, Skipped, Subject, distance
from jaxgpt.trainer.program import Program


def remat(s: Subject, policy: Literal["dots", "full"]) -> float:
    """What the backward pass computes again is what the forward pass computed."""
    model = GPT(s.model_config, remat=policy)
    return distance(jax.jit(lambda p, w: s.gradient(p, w, model))(s.params, s.windows), s.plain_gradient)


def scanned(s: Subject) -> float:
    """One block that is run over stacked layers has the loss and the gradient of the layers one by one."""
    stacked = jax.jit(lambda p, w: s.gradient(p, w, s.model))
    loss, gradient = stacked(stack_layers(s.params), s.windows)
    return distance((loss, unstack_layers(gradient, s.model_config.n_layer)), s.plain_gradient)


def accumulation(s: Subject) -> float:
    """Four pieces of a batch, which differ in their numbers of tokens, have the loss and the gradient of the whole."""
    in_pieces = jax.jit(lambda p, w: s.gradient(p, w, s.model, 4))
    return distance(in_pieces(s.params, s.windows), s.plain_gradient)


def compiled(s: Subject) -> float:
    """The gradient as one compiled program is that of the same operations, one by one."""
    with jax.disable_jit():
        return distance(s.plain_gradient, s.gradient(s.params, s.windows, s.model))


def devices(s: Subject) -> float:
    """An update of the train step over several devices is that of one.

    The optimizer is Adam without memory and with an epsilon of 1: its update `lr g / (|g| + 1)` is as large as the gradient,
    while Adam's own, `g / |g|`, would make rounding in a vanishing gradient as large as everything.
    """
    found = jax.devices() if jax.device_count() > 1 else jax.devices("cpu")
    if len(found) < 2:
        raise Skipped("one device: JAX_NUM_CPU_DEVICES=8 makes eight of a CPU")
    smooth = OptimConfig(
        learning_rate=1000.0,
        schedule="constant",
        warmup_steps=0,
        beta1=0.0,
        beta2=0.0,
        eps=1.0,
        weight_decay=0.0,
        grad_clip=0.0,
    )
    config = replace(s.config, optim=smooth, train=replace(s.config.train, batch_size=ROWS))
    windows = np.asarray(s.random_ids((ROWS, min(STEPS, s.model_config.block_size) + 1)))
    params = jax.device_get(s.params)

    def update(config: Config) -> tuple[Any, Any]:
        shape = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        grid = np.array(found[: int(np.prod(shape))]).reshape(shape)
        program = Program(config, Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES)))
        state, metrics = program.step(program.start_from(params), program.put(windows))
        change = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, params)
        return change, jax.device_get((metrics["loss"], metrics["grad_norm"]))

    one = update(replace(config, mesh=MeshConfig(data=1)))
    many = update(replace(config, mesh=split(config, len(found))))
    return max(distance(a, b) for a, b in zip(many, one, strict=True))


def split(config: Config, n_devices: int) -> MeshConfig:
    """The mesh of up to eight devices that splits in the most ways what this model lets split."""
    n = max(n for n in (2, 4, 8) if n <= n_devices)
    shapes = [(d, f, n // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if n % (d * f) == 0]
    for data, fsdp, tensor in sorted(shapes, key=lambda shape: (max(shape), shape)):
        mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
        try:
            return resolve(replace(config, mesh=mesh), n_devices)[0]
        except UserError:
            continue
    raise Skipped(f"this model cannot be split over {n} devices")


def hazard(s: Subject) -> float:
    """Reductions over a product with a constant matrix, `sum_j (E c)_ij E_ij` and `sum_i`, which XLA's CPU backend can
    compile into wrong numbers, against NumPy in float64."""
    E = np.random.Generator(np.random.Philox(0)).standard_normal((128, 128), np.float32)
    worst = 0.0
    for axis in (0, 1):
        bites: Callable[[jax.Array], jax.Array] = jax.jit(partial(_product, axis=axis))
        wide = E.astype(np.float64)
        worst = max(worst, distance(bites(jnp.asarray(E)), ((wide @ np.full_like(wide, 0.5)) * wide).sum(axis)))
    return worst


def _product(E: jax.Array, axis: int) -> jax.Array:
    return jnp.sum((E @ jnp.full_like(E, 0.5)) * E, axis)
