"""The argument `frozen` of `build`: its shapes, then its arrays on the devices.

It has four forms: a tree of arrays; a function from a `Place` to weights; `FrozenParts` of two of these; and None, which means
random weights if the run trains adapters, and otherwise no arrays.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax

from jaxgpt.config import Config, ModelConfig
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.train.adapters import FrozenParts
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.states import Fresh, compute, put_stacked, stacked


def frozen_shapes(config: Config, shapes: Fresh, frozen: Any, frozen_model: ModelConfig | None) -> Any:
    """Return the shapes of frozen arrays, with stacked layers if training stacks them.

    The shapes of a `frozen_model` are in linen's boxes, which hold logical axes. `shapes`: shapes of the result of `fresh`;
    other arguments as for `make_program`.
    """
    if isinstance(frozen, FrozenParts):
        base = frozen_shapes(config, shapes, frozen.base, None)
        other = frozen_shapes(config, shapes, frozen.of_objective, frozen_model)
        return FrozenParts(base, other)
    if frozen is None:
        return nn.unbox(shapes.weights) if config.lora.rank else ()
    if not callable(frozen):
        return jax.eval_shape(partial(stacked, config), frozen)
    if frozen_model is None:
        return nn.unbox(shapes.weights)
    return jax.eval_shape(lambda: stacked(config, boxed_params(GPT(frozen_model), 0)))


def frozen_arrays(program: Program, frozen: Any, like: Any) -> Any:
    """Return frozen arrays on the devices: `frozen` as in `build`, with the shapes and shardings of `like`."""
    if isinstance(frozen, FrozenParts):
        base = frozen_arrays(program, frozen.base, like.base)
        other = frozen_arrays(program, frozen.of_objective, like.of_objective)
        return FrozenParts(base, other)
    if not jax.tree.leaves(like):
        return like

    config = program.config
    if frozen is None:
        return compute(program.mesh, lambda seed: nn.unbox(program.fresh(seed).weights), config.train.seed, like)
    if callable(frozen):
        return put_stacked(config, frozen(program.place), like, donate=True)
    return put_stacked(config, frozen, like)  # the given arrays may be on other devices
