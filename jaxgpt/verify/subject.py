"""The model under test, with results that laws share, and the distance between two results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Config
from jaxgpt.convert.export_model import export_model
from jaxgpt.errors import UserError
from jaxgpt.kernels import best
from jaxgpt.lm import LM, save
from jaxgpt.model import GPT
from jaxgpt.train import step
from jaxgpt.train.loss import next_token_loss
from jaxgpt.train.side_outputs import router_penalties

LENGTH = 48  # maximum number of tokens per row of a forward pass; fewer in a short context
ROWS = 8  # rows of a batch for gradients, shardable over 2, 4 or 8 devices
BATCH_LENGTH = 24  # maximum number of tokens per row of a batch for gradients; fewer in a short context
FLOOR = 1e-3  # minimum scale of a leaf, relative to the largest magnitude in its tree


class NotApplicable(Exception):
    """Raised by a law that does not apply, with the reason."""


@dataclass(frozen=True)
class Subject:
    """The model under test, and the tokens and results that several laws share."""

    lm: LM  # model with float32 weights on one device
    directory: Path  # an empty directory for exports and checkpoints

    @cached_property
    def config(self) -> Config:
        """The float32 config with attention auto, without dropout, remat, accumulation, scan or loss chunks."""
        config = self.lm.config.with_model(dropout=0.0)
        plain: dict[str, Any] = {"remat": "none", "accumulation": 1, "scan_layers": False, "loss_chunk": 0}
        train = replace(config.train, attention="auto", compute_dtype="float32", **plain)
        return replace(config, train=train)

    @property
    def params(self) -> Any:
        """The float32 weights."""
        return self.lm.params

    @cached_property
    def model(self) -> GPT:
        """The model with the operations that training uses by default on this device."""
        return GPT(self.config.model, best(self.config))

    @cached_property
    def forward(self) -> Callable[[Any, jax.Array], jax.Array]:
        """The compiled forward pass: params and ids to logits."""
        model = self.model
        return jax.jit(lambda params, tokens_BT: model.apply({"params": params}, tokens_BT))

    @property
    def length(self) -> int:
        """Tokens per row of a forward pass."""
        return min(LENGTH, self.config.model.block_size)

    @cached_property
    def tokens(self) -> jax.Array:
        """Fixed ids `[2, length]`."""
        return self.random_ids((2, self.length))

    @cached_property
    def windows(self) -> jax.Array:
        """Windows `[8, T + 1]` for gradients; the first two are padded, so that token counts of rows differ."""
        T = min(BATCH_LENGTH, self.config.model.block_size)
        windows = self.random_ids((ROWS, T + 1))
        windows = windows.at[0, 1 + T // 3 :].set(-1)
        return windows.at[1, 1 + T // 2 :].set(-1)

    def random_ids(self, shape: tuple[int, ...], below: int = 0) -> jax.Array:
        """Draw ids below `below` (0: the vocabulary size) with NumPy, so that they do not depend on JAX."""
        top = below or self.config.model.vocab_size
        return jnp.asarray(np.random.Generator(np.random.Philox(0)).integers(0, top, shape, np.int32))

    def gradient(
        self, model: GPT, params: Any, windows_BT1: jax.Array, accumulation: int = 1
    ) -> tuple[dict[str, jax.Array], Any]:
        """Compute the means of the loss and of side outputs, and the gradient, as the train step does."""
        penalties = router_penalties(self.config) or None  # None: no side outputs
        objective = next_token_loss(model.apply, penalties=penalties)
        return step.gradients(params, windows_BT1, None, objective=objective, accumulation=accumulation)

    def compiled_gradient(self, model: GPT, accumulation: int = 1) -> tuple[dict[str, np.ndarray], Any]:
        """Compile `gradient`, and evaluate it with the weights and windows of the subject."""
        compute = jax.jit(lambda params, windows: self.gradient(model, params, windows, accumulation))
        means, gradient = jax.device_get(compute(self.params, self.windows))
        return means, gradient

    @cached_property
    def plain_gradient(self) -> tuple[dict[str, np.ndarray], Any]:
        """Means and gradient of the whole batch, compiled, without remat."""
        return self.compiled_gradient(self.model)

    @cached_property
    def saved(self) -> Path:
        """The model saved as a run directory."""
        save(self.lm._replace(config=self.config), self.directory / "run")
        return self.directory / "run"

    @cached_property
    def exported(self) -> Path:
        """The model exported for transformers; raises `NotApplicable` if transformers has no equivalent."""
        try:
            export_model(self.saved, self.directory / "exported")
        except UserError as e:
            raise NotApplicable(str(e)) from None
        return self.directory / "exported"


def distance(found: Any, expected: Any) -> float:
    """Compute the largest relative difference between two trees of arrays.

    `max_leaf ( max |a - b| / max(max |b|, FLOOR * max_tree |b|) )`, with a from `found` and b from `expected`.

    The floor is for leaves that are zero in theory, such as the keys' bias gradient without RoPE: they hold rounding error.

    Returns:
        The difference: 0 if the trees are equal; infinity if an element is non-finite, shapes differ, or all of
        `expected` is zero but `found` is not.
    """
    pairs = list(zip(_leaves(found), _leaves(expected), strict=True))
    sizes = [float(np.abs(b).max(initial=0)) for _, b in pairs]
    worst = 0.0
    for (a, b), size in zip(pairs, sizes, strict=True):
        if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return float("inf")
        difference = float(np.abs(a - b).max(initial=0))
        if difference == 0:
            continue
        scale = max(size, FLOOR * max(sizes))
        worst = max(worst, difference / scale if scale else float("inf"))
    return worst


def _leaves(tree: Any) -> list[np.ndarray]:
    """Return the arrays of a tree, float64."""
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
