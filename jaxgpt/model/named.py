"""Base class of the modules: configuration, operations and named activations."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxgpt.config import ModelConfig
from jaxgpt.ops import Ops


class Named(nn.Module):
    """A module with named activations, which `ops.edit` reads and replaces.

    Attributes:
        config: the architecture.
        ops: functions that compute each operation.
    """

    config: ModelConfig
    ops: Ops

    def named(self, name: str, x: jax.Array) -> jax.Array:
        """Return x, or the array that `ops.edit` returns for it."""
        return x if self.ops.edit is None else self.ops.edit("/".join((*self.path, name)), x)
