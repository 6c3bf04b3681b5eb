"""States on the devices of a layout: fresh, from weights, and to and from checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import flax.linen as nn
import jax

from jaxgpt.parallel import block_on_cpu_mesh, quick_compile_options
from jaxgpt.train.step import TrainState, init_state
from jaxgpt.trainer.layout import Layout, placements, stacked

T = TypeVar("T")


def fresh_state(layout: Layout) -> TrainState:
    """Make the state before the first step, each array on its own devices."""
    return _made(layout, lambda seed: layout.fresh(seed)[2], layout.config.train.seed, layout.state)


def frozen_weights(layout: Layout, params: Any = None) -> Any:
    """Place the frozen weights, given per layer; None: random ones. `()` if all weights are trained."""
    if not layout.frozen:
        return ()
    if params is None:
        return _made(layout, lambda seed: nn.unbox(layout.fresh(seed)[0]), layout.config.train.seed, layout.frozen)
    return _made(layout, lambda params: stacked(layout, params), params, layout.frozen)


def state_from(layout: Layout, params: Any) -> TrainState:
    """Make the state before the first step from weights per layer."""
    average = layout.config.optim.ema_decay > 0
    init = lambda params: stacked(layout, init_state(params, layout.optimizer, average))  # noqa: E731
    return _made(layout, init, params, layout.state)


def place_params(layout: Layout, params: Any) -> Any:
    """Place weights per layer for evaluation."""
    return block_on_cpu_mesh(layout.mesh, jax.device_put(stacked(layout, params), placements(layout.state.params)))


def to_checkpoint(layout: Layout, state: TrainState) -> TrainState:
    """Unstack the layers of a state: a copy, which takes memory of the devices until it is written."""
    if not layout.config.train.scan_layers:
        return state
    return block_on_cpu_mesh(layout.mesh, layout.unstack(state))


def from_checkpoint(layout: Layout, state: TrainState) -> TrainState:
    """Invert `to_checkpoint`."""
    if not layout.config.train.scan_layers:
        return state
    stack = jax.jit(partial(stacked, layout), out_shardings=placements(layout.state))
    return block_on_cpu_mesh(layout.mesh, stack(state))


def _made(layout: Layout, make: Any, argument: Any, like: T) -> T:
    options = quick_compile_options(layout.mesh)
    made: T = jax.jit(make, out_shardings=placements(like), compiler_options=options)(argument)
    return made
