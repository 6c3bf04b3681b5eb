"""Base class of the modules: configuration, operations, weights and named activations."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.ops import Ops


class Module(nn.Module):
    """A module that declares weights with logical axes, and names its activations.

    Attributes:
        config: the architecture.
        ops: functions that compute each operation.
    """

    config: ModelConfig
    ops: Ops

    @nn.nowrap  # keeps this helper out of linen's interceptors and the scopes of compiled programs
    def weight(
        self, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> Any:
        """Declare a weight with logical axes (None: not sharded) in `init`; return the given array or stored weight in `apply`.

        Raises:
            ValueError: if the given weight has a different shape.
        """
        if not self.has_variable("params", name):
            return self.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)
        given: Any = nn.unbox(self.get_variable("params", name))  # not `param`, which rejects stored weights
        if given.shape != shape:
            raise ValueError(
                f"{self._path_of(name)} has shape {given.shape}; expected {shape}: pass weights for this config"
            )
        return jnp.asarray(given) if isinstance(given, np.ndarray) else given

    # No `nowrap` here: the scope `named` marks the operations of an edit in compiled programs.
    def named(self, name: str, x: jax.Array) -> jax.Array:
        """Name the activation x: return the result of `ops.edit(path, x)`, or x if `ops.edit` is None."""
        if self.ops.edit is None:
            return x
        return self.ops.edit(self._path_of(name), x)

    @nn.nowrap
    def _path_of(self, name: str) -> str:
        return "/".join((*self.path, name))
