"""Compare the logits of a model with the logits of its exported files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.convert.open_model import read_model
from jaxgpt.errors import TrainingFailed
from jaxgpt.model import GPT

TOLERANCE = 1e-5  # maximum change of a logit by an export, relative to the largest absolute logit if above 1


def probe_logits(config: ModelConfig, params: Any) -> np.ndarray:
    """Compute the logits of at most 32 fixed random ids, float32 `[1, T, V]`."""
    length = min(config.block_size, 32)
    random = np.random.Generator(np.random.Philox(0))
    tokens_BT = random.integers(0, config.vocab_size, (1, length), np.int32)
    forward: Callable[..., Any] = jax.jit(lambda p, tokens: GPT(config).apply({"params": p}, tokens))
    with jax.default_matmul_precision("highest"):
        return np.asarray(forward(params, jnp.asarray(tokens_BT)))


def reread_logits(path: Path) -> np.ndarray:
    """Read an exported directory or GGUF file, and compute its `probe_logits`."""
    exported = read_model(path)
    return probe_logits(exported.config, exported.params)


def check_change(before: np.ndarray, after: np.ndarray) -> None:
    """Raise `TrainingFailed` if the largest change of a logit by an export exceeds `TOLERANCE`."""
    change = largest_change(before, after)
    largest_logit = float(np.abs(before).max())
    if not change <= TOLERANCE * max(1.0, largest_logit):
        raise TrainingFailed(
            f"the export failed: its logits differ from the model's logits by {change:.2e}, more than by rounding: report this"
        )


def largest_change(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest absolute difference of logits."""
    return float(np.abs(before - after).max())
