"""Capture hidden states and attention maps of forward passes and of generation, under jit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxgpt.config import ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, Generation, generate
from jaxgpt.lm.arguments import encode_prompt
from jaxgpt.lm.model import unstacked
from jaxgpt.study.run import ForwardPass, replay, run


class Captured(NamedTuple):
    """Logits and activations of one forward pass.

    Attributes:
        logits: `[B, T, V]`.
        hidden: L + 1 arrays `[B, T, D]`: the input of the first block, then the output of each block, the last one after the
            final norm. The same as transformers' `output_hidden_states`.
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
        UserError: if the ids are no integer array `[B, T]`, or outside the vocabulary or longer than the context length.
    """
    hidden, patterns = captured_names(lm.config.model)
    return _captured(run(lm, tokens_BT, (*hidden, *patterns)), hidden, patterns)


class CapturedGeneration(NamedTuple):
    """A generated text with its activations.

    Attributes:
        ids: the ids of the prompt and of the generated text.
        generation: as `generate` returns it.
        captured: as `capture(lm, [ids])` returns it, computed with the cache; without RoPE, the last id is omitted if it
            exceeds the context length.
    """

    ids: list[int]
    generation: Generation
    captured: Captured


def capture_generation(lm: LM, prompt: str | Sequence[int], **settings: Any) -> CapturedGeneration:
    """Generate as `jaxgpt.generate` does, and capture the activations: of the prompt in one pass, then token by token.

    Args:
        lm: the model.
        prompt: text or ids.
        settings: arguments of `jaxgpt.generate`. Captures the first of several sequences.

    Raises:
        UserError: as `jaxgpt.generate`, or if `overflow="slide"` dropped the beginning of the text.
    """
    lm, longest = unstacked(lm), lm.config.model.block_size
    generation = generate(lm, [prompt], **settings)[0]
    prompt_ids = encode_prompt(lm.tokenizer, lm.config.model.vocab_size, prompt).ids
    read = len(prompt_ids) + max(len(generation.ids) - 1, 0)
    if settings.get("overflow") == "slide" and read > longest:
        raise UserError(
            f"{read} tokens exceed the context length of {longest}, so overflow slide dropped the beginning of the text: "
            f"shorten the prompt, or lower max-new-tokens"
        )
    hidden, patterns = captured_names(lm.config.model)
    out = replay(lm, prompt_ids, generation.ids, (*hidden, *patterns))
    return CapturedGeneration(prompt_ids + generation.ids, generation, _captured(out, hidden, patterns))


def captured_names(config: ModelConfig) -> tuple[list[str], list[str]]:
    """Return the names of the hidden states and of the attention maps."""
    layers = range(config.n_layer)
    normed = config.final_norm and config.norm != "none"
    last = "ln_f.out" if normed else f"resid.post.{config.n_layer - 1}"
    return [*(f"resid.pre.{layer}" for layer in layers), last], [f"h.{layer}.attn.pattern" for layer in layers]


def _captured(out: ForwardPass, hidden: list[str], patterns: list[str]) -> Captured:
    return Captured(out.logits, tuple(out.taps[name] for name in hidden), tuple(out.taps[name] for name in patterns))
