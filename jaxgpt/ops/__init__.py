"""Functions of arrays, and `Ops`: a tuple of the functions that compute the operations of a decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxgpt.ops import activations, attention, experts, linear, norms, rotary
from jaxgpt.ops.attention import Edit, Visible

Array = jax.Array


class AttendFn(Protocol):
    """The signature of `ops.attention.attend`."""

    def __call__(
        self, q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None, /
    ) -> Array: ...


class LinearFn(Protocol):
    """The signature of `ops.linear.linear`."""

    def __call__(self, x: Array, w: Any, b: Array | None, dtype: Any, /) -> Array: ...


class NormFn(Protocol):
    """The signature of `ops.norms.norm`."""

    def __call__(
        self, kind: str, x: Array, eps: float, gain: Array | None, bias: Array | None, edit: Edit | None, /
    ) -> Array: ...


class ExpertsFn(Protocol):
    """The signature of `ops.experts.experts`."""

    def __call__(
        self,
        x_BTD: Array,
        choice_BTA: Array,
        share_BTA: Array,
        weights: experts.ExpertWeights,
        activate: activations.Activation,
        dtype: Any,
        /,
    ) -> Array: ...


class Ops(NamedTuple):
    """The functions that compute each operation; the defaults are the reference definitions.

    `jaxgpt.kernels.best` selects faster equivalents. Models with equal configs, operations and remat policies are equal and
    share compiled programs. Functions compare by identity, so an entry should be a module-level function, or an object with
    `__call__` that compares by value.

    Attributes:
        dtype: dtype of matrix products and of the residual stream; trained parameters, norms, softmax and loss are float32.
        linear: `x W + b`; W is an array `[in, out]`, or a `StoredWeight`.
        norm: normalization by name, with gain and bias.
        activate: activation function by name.
        rotation: cosine and sine of the RoPE angles of positions.
        attend: `softmax(scale q k^T) v` over the visible keys.
        experts: sum of the outputs of each token's experts, weighted by their shares.
        edit: called with the path and array of each named activation; returns the array to use. None: no activation is
            read or replaced.
    """

    dtype: Any = jnp.dtype("float32")
    linear: LinearFn = linear.linear
    norm: NormFn = norms.norm
    activate: Callable[[str, Array], Array] = activations.activate
    rotation: Callable[[Array, Any], rotary.Rotation] = rotary.rope_rotation
    attend: AttendFn = attention.attend
    experts: ExpertsFn = experts.experts
    edit: Edit | None = None
