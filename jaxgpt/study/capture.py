"""Capture hidden states and attention maps of forward passes and of generation, under jit."""

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
    """Logits and activations of one forward pass.

    Attributes:
        logits: `[B, T, V]`.
        hidden: L + 1 arrays `[B, T, D]`: the input of the first block, then the output of each block, the last one after the
            final norm. The same as `output_hidden_states` of transformers.
        attentions: L arrays `[B, N, T, T]`, float32: rows sum to 1 and are 0 above the diagonal.
    """

    logits: jax.Array
    hidden: tuple[jax.Array, ...]
    attentions: tuple[jax.Array, ...]


def capture(lm: LM, tokens_BT: Any) -> Captured:
    """Compute logits, hidden states and attention maps in one forward pass.

    Args:
        lm: the model.
        tokens_BT: ids, an integer array or nested lists.

    Raises:
        UserError: not an integer array `[B, T]`, an id outside the vocabulary, or more tokens than the context length.
    """
    ids_BT = np.asarray(tokens_BT)
    config = lm.config.model
    _check(config, ids_BT)
    return _full_pass(config, lm.config.train.compute_dtype)(lm.params, jnp.asarray(ids_BT, jnp.int32))


def _check(config: ModelConfig, ids_BT: np.ndarray) -> None:
    if ids_BT.ndim != 2 or not ids_BT.size or not np.issubdtype(ids_BT.dtype, np.integer):
        raise UserError(f"expected integer ids of shape [B, T], not {ids_BT.dtype} of shape {ids_BT.shape}")
    if ids_BT.shape[1] > config.block_size:
        raise UserError(f"{ids_BT.shape[1]} tokens do not fit the context of {config.block_size} (model.block_size)")
    for extreme in (int(ids_BT.min()), int(ids_BT.max())):
        if not 0 <= extreme < config.vocab_size:
            raise UserError(f"id {extreme} is outside the vocabulary of {config.vocab_size}")


class CapturedGeneration(NamedTuple):
    """A generated text with its activations.

    Attributes:
        ids: the ids of the prompt and of the generated text.
        generation: as `generate` returns it.
        captured: as `capture(lm, [ids])` returns it, computed with the cache.
    """

    ids: list[int]
    generation: Generation
    captured: Captured


def capture_generation(lm: LM, prompt: str | Sequence[int], **settings: Any) -> CapturedGeneration:
    """Generate as `jaxgpt.generate` does, and capture the activations: of the prompt in one pass, then token by token.

    Args:
        lm: the model.
        prompt: text or ids.
        settings: those of `jaxgpt.generate`. Of several texts for the prompt, the first is captured.

    Raises:
        UserError: as `jaxgpt.generate`, or the text is longer than the context (`overflow="slide"`).
    """
    generation = generate(lm, [prompt], **settings)[0]
    prompt_ids = encode_prompt(lm.tokenizer, lm.config.model.vocab_size, prompt).ids
    ids = prompt_ids + generation.ids
    _check(lm.config.model, np.asarray([ids]))
    program = _cached_passes(lm.config.model, lm.config.train.compute_dtype)
    captured = program(lm.params, jnp.asarray([ids], jnp.int32), len(prompt_ids))
    return CapturedGeneration(ids, generation, captured)


@lru_cache(maxsize=8)
def _full_pass(config: ModelConfig, dtype: str) -> Any:
    model = GPT(config, dtype=jnp.dtype(dtype))

    def forward(params: Any, tokens_BT: jax.Array) -> Captured:
        logits_BTV, sown = model.apply({"params": params}, tokens_BT, mutable="intermediates")
        return _captured(config, logits_BTV, sown)

    return jax.jit(forward)


@lru_cache(maxsize=8)
def _cached_passes(config: ModelConfig, dtype: str) -> Any:
    model = GPT(config, dtype=jnp.dtype(dtype))

    def forward(params: Any, tokens_1T: jax.Array, prompt_length: int) -> Captured:
        def extend(cache: Any, tokens_1t: jax.Array) -> tuple[Any, Captured]:
            (logits_1tV, cache), sown = model.apply(
                {"params": params}, tokens_1t, cache, method="extend", mutable="intermediates"
            )
            return cache, _captured(config, logits_1tV, sown)

        empty = init_cache(config, jnp.zeros((1,), jnp.int32), tokens_1T.shape[1], model.dtype)
        cache, prompt = extend(empty, tokens_1T[:, :prompt_length])
        _, steps = jax.lax.scan(extend, cache, tokens_1T[:, prompt_length:].T[:, :, None])
        # Queries are the last axis but one of every array; the scan stacked its steps along a new first axis.
        return jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.moveaxis(b[..., 0, :], 0, -2)], -2), prompt, steps)

    return jax.jit(forward, static_argnums=2)


def _captured(config: ModelConfig, logits_BTV: jax.Array, sown: Any) -> Captured:
    sown = sown["intermediates"]
    attentions = tuple(sown[f"h_{layer}"]["attn"]["attention"][0] for layer in range(config.n_layer))
    return Captured(logits_BTV, tuple(sown["hidden"]), attentions)
