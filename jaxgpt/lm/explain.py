"""Explain how one token was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.config import SEED, SamplingParams, TextParams
from jaxgpt.decoding import TokenBuffer
from jaxgpt.decoding.explain import Choice
from jaxgpt.decoding.explain import explain as explain_choice
from jaxgpt.decoding.sampling import Filter, with_filters
from jaxgpt.lm.arguments import encode_prompt, fit_context, make_settings, row_keys
from jaxgpt.lm.model import LM, placed, sampler_of, unstacked


def explain(
    lm: LM,
    prompt: str | Sequence[int],
    *,
    filters: Sequence[Filter] = (),
    key: int | jax.Array = SEED,
    **sampling: Any,
) -> Choice:
    """Explain the first token that `generate` returns for the same arguments: each filter's effect, and the random number.

    Args:
        lm: model.
        prompt: a string, or ids.
        filters: custom filters, as for `generate`.
        key: a seed or a `jax.random.key`; an array of one key is used unchanged, such as `Choice.key`.
        **sampling: fields of `SamplingParams`.

    Raises:
        UserError: if an argument is invalid, or the prompt exceeds the context.
    """
    [params] = make_settings(sampling, SamplingParams)
    lm = unstacked(lm)
    encoded = encode_prompt(lm.tokenizer, lm.config.model.vocab_size, prompt)
    fit_context(lm.config.model, [encoded], TextParams(max_new_tokens=1))
    ids = encoded.ids
    text = TokenBuffer(jnp.array([ids], jnp.int32), jnp.zeros((1,), jnp.int32), jnp.int32(len(ids)))
    with placed(lm, 1):
        logits_11V, _ = sampler_of(lm).model.prefill(lm.params, text.ids_BS, text.positions(), len(ids), True)
    return explain_choice(logits_11V[:, -1], text, with_filters(params, filters), row_keys(key, 1, 1)[0])
