"""What goes on inside: the hidden states and attention maps that the model sows, collected under jit."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig, UserError
from jaxgpt.lm import LM
from jaxgpt.model import GPT


class Captured(NamedTuple):
    """One forward pass, seen from inside.

    Attributes:
        logits: `[B, T, V]`.
        hidden: L + 1 of `[B, T, D]`: what enters the first block, then what leaves each block, the last one after the
            final norm (as `output_hidden_states` of transformers has it: 13 for GPT-2).
        attentions: L of `[B, N, T, T]`, float32: rows sum to 1, and are 0 above the diagonal.
    """

    logits: jax.Array
    hidden: tuple[jax.Array, ...]
    attentions: tuple[jax.Array, ...]


def capture(lm: LM, tokens_BT: Any) -> Captured:
    """Hidden states and attention maps of a forward pass.

    Args:
        lm: the model.
        tokens_BT: ids.

    Raises:
        UserError: not a batch of ids, ids beyond the vocabulary, or more tokens than the context holds.
    """
    ids_BT = np.asarray(tokens_BT)
    config = lm.config.model
    if ids_BT.ndim != 2 or not ids_BT.size or not np.issubdtype(ids_BT.dtype, np.integer):
        raise UserError(f"ids of shape [B, T] are expected, not {ids_BT.dtype} of shape {ids_BT.shape}")
    if ids_BT.shape[1] > config.block_size:
        raise UserError(f"{ids_BT.shape[1]} tokens do not fit the context of {config.block_size} (model.block_size)")
    for worst in (int(ids_BT.min()), int(ids_BT.max())):
        if not 0 <= worst < config.vocab_size:
            raise UserError(f"id {worst}: the vocabulary has {config.vocab_size}")
    return _compiled(config, lm.config.train.compute_dtype)(lm.params, jnp.asarray(ids_BT, jnp.int32))


@lru_cache(maxsize=8)
def _compiled(config: ModelConfig, dtype: str) -> Any:
    model = GPT(config, dtype=jnp.dtype(dtype))

    def forward(params: Any, tokens_BT: jax.Array) -> Captured:
        logits_BTV, seen = model.apply({"params": params}, tokens_BT, mutable="intermediates")
        sown = seen["intermediates"]
        attentions = tuple(sown[f"h_{layer}"]["attn"]["attention"][0] for layer in range(config.n_layer))
        return Captured(logits_BTV, tuple(sown["hidden"]), attentions)

    return jax.jit(forward)
