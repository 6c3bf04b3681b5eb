"""The observer of a forward pass: it applies edits of activations by name, and collects taps.

The model passes each named activation to `ops.edit` and uses the array that it returns. Here, `ops.edit` is an `Observer`.
Without edits and taps, `ops.edit` is None, and the compiled program equals the program of `GPT.apply`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.checkpoint.match import check_names
from jaxgpt.errors import UserError, short_repr
from jaxgpt.lm import LM
from jaxgpt.lm.weights import dequantize
from jaxgpt.model import GPT
from jaxgpt.model.scan import per_layer
from jaxgpt.ops import Ops
from jaxgpt.study.activation_names import activation_name
from jaxgpt.suggestions import did_you_mean

# Names of activations may be patterns (`fnmatch`): `*` matches any part of a name.
Taps = tuple[str, ...]  # names of the activations to return
ActivationEdit = Callable[[jax.Array], Any]  # function from an activation to its replacement
Edits = tuple[tuple[str, ActivationEdit], ...]  # pairs of an activation's name and its edit


class ForwardPass(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: `[B, T, V]`, float32.
        taps: dict of the requested activations, keyed by name, after edits, in order of computation.
    """

    logits: jax.Array
    taps: dict[str, jax.Array]


def observed(lm: LM) -> GPT:
    """Return the module of a model with the reference operations, which expose all activations."""
    return lm.model(lm.config.model, Ops(jnp.dtype(lm.config.train.compute_dtype)))


def forward(model: GPT, params: Any, tokens_BT: jax.Array, taps: Taps = (), edits: Edits = ()) -> ForwardPass:
    """Run the model with an observer: `run` without jit, the mesh and the checks of ids."""
    params = per_layer(params, model.config.n_layer)
    params = dequantize(params)  # int8 products round their inputs, so gradients would be wrong
    check_names(params, model)

    observer = Observer(edits, taps)
    if edits or taps:
        model = model.clone(ops=model.ops._replace(edit=observer))
    logits_BTV: Any = model.apply({"params": params}, tokens_BT)
    return ForwardPass(logits_BTV, observer.results())


def replace_with(value: jax.Array) -> ActivationEdit:
    """Return an edit that replaces an activation with `value`."""

    def edit(_: jax.Array) -> jax.Array:
        return value

    return edit


class Observer:
    """An `ops.edit` that applies edits and collects taps during tracing; compared by edits and taps.

    An observer is for one forward pass.
    """

    def __init__(self, edits: Edits = (), taps: Taps = ()) -> None:
        self.edits = edits
        self.taps = taps
        self._taken = OrderedDict[str, jax.Array]()  # jit keeps the order of an OrderedDict
        self._seen: list[str] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Observer) and (self.edits, self.taps) == (other.edits, other.taps)

    def __hash__(self) -> int:
        return hash((self.edits, self.taps))

    def __call__(self, path: str, x: jax.Array) -> jax.Array:
        """Apply the matching edits to an activation, and record it if it is tapped."""
        name = activation_name(path)
        self._seen.append(name)
        for pattern, edit in self.edits:
            if fnmatchcase(name, pattern):
                x = _edited(name, edit, x)
        if any(fnmatchcase(name, pattern) for pattern in self.taps):
            self._taken[name] = x
        return x

    def results(self) -> dict[str, jax.Array]:
        """Return the taps; raise `UserError` if a name matches no activation."""
        edited = [pattern for pattern, _ in self.edits]
        for pattern in (*self.taps, *edited):
            if not any(fnmatchcase(name, pattern) for name in self._seen):
                near = did_you_mean(pattern, self._seen)
                raise UserError(f"no activation {short_repr(pattern)}{near}: jaxgpt.study.names(lm) lists all names")
        return self._taken


def _edited(name: str, edit: ActivationEdit, x: jax.Array) -> jax.Array:
    """Apply an edit; raise `UserError` if it changes the shape or dtype."""
    result = jnp.asarray(edit(x))
    if (result.shape, result.dtype) != (x.shape, x.dtype):
        raise UserError(
            f"the edit of {name} returned {result.dtype} {list(result.shape)} for {x.dtype} {list(x.shape)}: shape "
            f"and dtype must stay the same"
        )
    return result
