"""Ids for the functions of `jaxgpt.study`: a text or ids `[B, T]`, checked, and placed on the devices of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.lm.arguments import encode_prompt, start_ids
from jaxgpt.lm.model import check_lm
from jaxgpt.lm.placement import use_mesh_of
from jaxgpt.settings import as_int
from jaxgpt.study.observer import observed

Result = TypeVar("Result")


def on_tokens(compute: Callable[..., Result], lm: LM, ids: Any, *args: Any) -> Result:
    """Return `compute(model, params, tokens_BT, *args)` for a text or ids, on the devices of the model."""
    tokens_BT = as_tokens(lm, ids)
    with use_mesh_of(lm, len(tokens_BT)):
        return compute(observed(lm), lm.params, tokens_BT, *args)


def as_tokens(lm: LM, ids: Any) -> jax.Array:
    """Convert a text or ids to an int32 array `[B, T]`.

    Raises `UserError` if ids are not integers `[B, T]`, are outside the vocabulary, or exceed the context length.
    """
    check_lm(lm)
    model = lm.config.model
    if isinstance(ids, str):
        ids = [encode_prompt(lm.tokenizer, model.vocab_size, ids) or start_ids(lm.tokenizer)]
    try:
        # The values of traced ids are unknown: check their shape and dtype.
        known = np.zeros(ids.shape, ids.dtype) if isinstance(ids, jax.core.Tracer) else np.asarray(ids)
    except ValueError:
        raise UserError("expected integer ids of shape [B, T], not rows of different lengths") from None
    is_integer = np.issubdtype(known.dtype, np.integer)
    if known.ndim != 2 or not known.size or not is_integer:
        raise UserError(f"expected integer ids of shape [B, T], not {known.dtype} of shape {known.shape}")
    if known.shape[1] > model.block_size:
        raise UserError(f"{known.shape[1]} tokens do not fit the context of {model.block_size}: use fewer tokens")
    for extreme in (int(known.min()), int(known.max())):
        if not 0 <= extreme < model.vocab_size:
            raise UserError(
                f"id {extreme} is outside the vocabulary of {model.vocab_size}: use ids of the model's tokenizer"
            )
    return jnp.asarray(ids, jnp.int32)


def answer_ids(V: int, answer: Any, rows: int) -> jax.Array:
    """Convert one id, or one id per row, to int32 `[B]`.

    Raises `UserError` for a wrong number of ids, or an id outside the vocabulary.
    """
    ids = np.asarray(answer).reshape(-1).tolist()
    if len(ids) not in (1, rows):
        raise UserError(f"{len(ids)} answers for {rows} rows of ids: pass one answer, or one answer per row")
    ids = [as_int("an answer", i, 0, V - 1) for i in ids]
    return jnp.asarray(ids * (rows // len(ids)), jnp.int32)
