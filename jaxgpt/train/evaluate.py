"""The loss over a whole split: the same windows in the same order every time, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.data import Tokens, eval_batch, eval_windows
from jaxgpt.train.build import Program


class Evaluation(NamedTuple):
    """A mean over tokens.

    Attributes:
        loss: nats a token.
        stderr: standard error of the loss, from the spread between windows.
        windows: how many.
        tokens: how many were predicted.
    """

    loss: float
    stderr: float
    windows: int
    tokens: int


def evaluate(
    program: Program, params: Any, tokens: Tokens, interrupted: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """The loss of `params` on all windows of a split, side by side; None if `interrupted` said so on the way."""
    config = program.config
    batch_size = config.train.eval_batch_size or config.train.batch_size // config.train.accumulation
    ways = program.mesh.shape["data"] * program.mesh.shape["fsdp"]
    batch_size = math.ceil(batch_size / ways) * ways
    block_size, stride = config.model.block_size, config.data.stride
    n = eval_windows(tokens, block_size, stride)
    sums, counts = [], []
    for index in range(math.ceil(n / batch_size)):
        if interrupted():
            return None
        rows = partial(eval_batch, tokens, block_size, stride, index, batch_size)
        loss, count = program.eval(params, program.read((batch_size, block_size + 1), rows))
        sums.append(loss)
        counts.append(count)
    return summarize(np.concatenate(jax.device_get(sums))[:n], np.concatenate(jax.device_get(counts))[:n])


def summarize(sums: np.ndarray, counts: np.ndarray) -> Evaluation:
    """Mean over all tokens; `stderr = std(window means) / sqrt(windows)`, as windows of one length are alike."""
    sums, counts = sums.astype(np.float64), counts.astype(np.int64)
    means = sums / counts
    stderr = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
    return Evaluation(float(sums.sum() / counts.sum()), stderr, len(sums), int(counts.sum()))


def eval_params(state: Any, config: Config) -> Any:
    """The weights that are evaluated and sampled: the average where one is kept."""
    return state.ema if config.optim.ema_decay > 0 else state.params
