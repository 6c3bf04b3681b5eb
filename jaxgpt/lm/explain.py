"""Explain how one token was chosen."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxgpt.config import SEED, SamplingParams
from jaxgpt.decoding import TokenBuffer
from jaxgpt.decoding.explain import Choice
from jaxgpt.decoding.explain import explain as explain_choice
from jaxgpt.decoding.sampling import Filter, with_filters
from jaxgpt.lm.model import LM, functions_of, placed, unstacked
from jaxgpt.prompts import encode_prompt, fit, row_keys


def explain(
    lm: LM,
    prompt: str | Sequence[int],
    *,
    temperature: float = SamplingParams.temperature,
    top_k: int = SamplingParams.top_k,
    top_p: float = SamplingParams.top_p,
    min_p: float = SamplingParams.min_p,
    repetition_penalty: float = SamplingParams.repetition_penalty,
    no_repeat_ngram_size: int = SamplingParams.no_repeat_ngram_size,
    filters: Sequence[Filter] = (),
    key: int | jax.Array = SEED,
) -> Choice:
    """Explain the first token that `generate` gives with the same arguments: every filter's effect, the random number, the
    token.

    Args:
        lm: the model.
        prompt: a string, or ids.
        temperature: divide the logits by this; 0 always takes the most probable token (greedy).
        top_k: keep the k most probable tokens; 0 disables.
        top_p: keep the smallest set of tokens with total probability >= p; 1 disables.
        min_p: drop tokens below min_p x the top probability; 0 disables.
        repetition_penalty: divide positive (multiply negative) logits of tokens in the text by this; 1 disables.
        no_repeat_ngram_size: never generate the same n tokens in a row twice; 0 disables.
        filters: functions of your own, as for `generate`.
        key: a seed or a `jax.random.key`; an array of one key is the row's own, as `Choice.key` gives it.

    Raises:
        UserError: an argument that cannot work, or a prompt longer than the context.
    """
    sampling = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size)
    sampling = with_filters(sampling, filters)
    lm = unstacked(lm)
    encoded = encode_prompt(lm.tokenizer, lm.config.model.vocab_size, prompt)
    [ids], _ = fit(lm.config.model, [encoded], 1, None)
    model = functions_of(lm)
    text = TokenBuffer(jnp.array([ids], jnp.int32), jnp.zeros((1,), jnp.int32), jnp.int32(len(ids)))
    with placed(lm, 1):
        logits_11V, _ = model.extend(lm.params, text.ids_BS, model.cache(text.start_B, len(ids)), True)
    return explain_choice(logits_11V[:, -1], text, sampling, row_keys(key, 1, 1)[0])
