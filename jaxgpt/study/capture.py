"""What goes on inside: the hidden states and attention maps that the model sows, collected under jit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig, UserError
from jaxgpt.lm import LM, Generation, generate
from jaxgpt.model import GPT, init_cache
from jaxgpt.prompts import encode_prompt


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
    _check(config, ids_BT)
    return _compiled(config, lm.config.train.compute_dtype)(lm.params, jnp.asarray(ids_BT, jnp.int32))


def _check(config: ModelConfig, ids_BT: np.ndarray) -> None:
    if ids_BT.ndim != 2 or not ids_BT.size or not np.issubdtype(ids_BT.dtype, np.integer):
        raise UserError(f"ids of shape [B, T] are expected, not {ids_BT.dtype} of shape {ids_BT.shape}")
    if ids_BT.shape[1] > config.block_size:
        raise UserError(f"{ids_BT.shape[1]} tokens do not fit the context of {config.block_size} (model.block_size)")
    for worst in (int(ids_BT.min()), int(ids_BT.max())):
        if not 0 <= worst < config.vocab_size:
            raise UserError(f"id {worst}: the vocabulary has {config.vocab_size}")


class Watched(NamedTuple):
    """A text that was generated, and what went on inside meanwhile.

    Attributes:
        ids: the prompt's and those that were made.
        generation: as `generate` returns it.
        seen: of all ids, what `capture(lm, [ids])` would show, but as the cache made it.
    """

    ids: list[int]
    generation: Generation
    seen: Captured


def capture_generation(lm: LM, prompt: str | Sequence[int], **settings: Any) -> Watched:
    """Continue a prompt and look inside: the prompt in one pass, then one token after the other through the cache.

    Args:
        lm: the model.
        prompt: string, or ids.
        settings: as `jaxgpt.generate` takes them; what is made is what it makes. The first text of several.

    Raises:
        UserError: as `jaxgpt.generate`; a text that grew beyond the context (`overflow`).
    """
    generation = generate(lm, [prompt], **settings)[0]
    read = encode_prompt(lm.tokenizer, lm.config.model.vocab_size, prompt).ids
    ids = read + generation.ids
    _check(lm.config.model, np.asarray([ids]))
    program = _cached(lm.config.model, lm.config.train.compute_dtype)
    return Watched(ids, generation, program(lm.params, jnp.asarray([ids], jnp.int32), len(read)))


@lru_cache(maxsize=8)
def _compiled(config: ModelConfig, dtype: str) -> Any:
    model = GPT(config, dtype=jnp.dtype(dtype))

    def forward(params: Any, tokens_BT: jax.Array) -> Captured:
        logits_BTV, sown = model.apply({"params": params}, tokens_BT, mutable="intermediates")
        return _captured(config, logits_BTV, sown)

    return jax.jit(forward)


@lru_cache(maxsize=8)
def _cached(config: ModelConfig, dtype: str) -> Any:
    model = GPT(config, dtype=jnp.dtype(dtype))

    def forward(params: Any, tokens_1T: jax.Array, read: int) -> Captured:
        def extend(cache: Any, tokens_1t: jax.Array) -> tuple[Any, Captured]:
            (logits_1tV, cache), sown = model.apply(
                {"params": params}, tokens_1t, cache, method="extend", mutable="intermediates"
            )
            return cache, _captured(config, logits_1tV, sown)

        empty = init_cache(config, jnp.zeros((1,), jnp.int32), tokens_1T.shape[1], model.dtype)
        cache, prompt = extend(empty, tokens_1T[:, :read])
        _, made = jax.lax.scan(extend, cache, tokens_1T[:, read:].T[:, :, None])
        # The query axis is the last but one of all of them; the scan has stacked queries in front.
        return jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.moveaxis(b[..., 0, :], 0, -2)], -2), prompt, made)

    return jax.jit(forward, static_argnums=2)


def _captured(config: ModelConfig, logits_BTV: jax.Array, sown: Any) -> Captured:
    sown = sown["intermediates"]
    attentions = tuple(sown[f"h_{layer}"]["attn"]["attention"][0] for layer in range(config.n_layer))
    return Captured(logits_BTV, tuple(sown["hidden"]), attentions)
