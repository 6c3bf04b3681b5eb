"""Explain how a token was sampled: the effect of each filter, and the random number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.config import SamplingParams, TextParams
from jaxgpt.decoding import TokenBuffer
from jaxgpt.decoding.filters import inverse_cdf_sample
from jaxgpt.decoding.sampler import extend, read_prompts
from jaxgpt.decoding.sampling import DIVERGED, Filter, row_uniform, stages
from jaxgpt.errors import UserError
from jaxgpt.lm.arguments import as_filters, make_settings, row_keys
from jaxgpt.lm.buffers import buffer_sizes, left_pad
from jaxgpt.lm.defaults import with_defaults
from jaxgpt.lm.model import LM, check_lm
from jaxgpt.lm.request import read_request
from jaxgpt.model import GPT
from jaxgpt.options import SEED


class Stage(NamedTuple):
    """The effect of one filter.

    Attributes:
        name: name of the filter, and its parameter, if any.
        removed: number of tokens that the filter removed, except tokens of probability 0.
        removed_mass: total probability of the removed tokens before the filter.
        moved_mass: total variation distance between the remaining tokens' normalized probabilities before and after the filter.
        left: number of remaining tokens, except tokens of probability 0.
    """

    name: str
    removed: int
    removed_mass: float
    moved_mass: float
    left: int


class Choice(NamedTuple):
    """The explanation of one sampled token.

    Attributes:
        stages: the effects of the enabled filters, in order.
        probability_V: probability of each token after all filters, float64, sum 1.
        uniform: the random number in [0, 1); None for greedy decoding.
        before: total probability of the tokens with ids below `token`. Up to rounding, `uniform` is between `before` and
            `before + probability_V[token]`.
        token: the sampled id.
        key: key data of the row. `uniform` is drawn with `fold_in(key, i)` for the new token i; i = 0 in `explain`.
    """

    stages: list[Stage]
    probability_V: np.ndarray
    uniform: float | None
    before: float
    token: int
    key: list[int]


def explain(
    lm: LM,
    prompt: str | Sequence[int],
    *,
    filters: Sequence[Filter] = (),
    key: int | jax.Array = SEED,
    **sampling: Any,
) -> Choice:
    """Explain the first token that `generate` samples: each filter's effect, and the random number.

    Args:
        lm: model.
        prompt: a string, or ids.
        filters: custom filters, as for `generate`.
        key: a seed or a `jax.random.key`; an array of one key, such as `np.uint32([choice.key])`, is used unchanged.
        **sampling: fields of `SamplingParams`; if not given, from the model's generation_config.json, as in `generate`.

    Raises:
        UserError: if an argument is invalid, the prompt exceeds the memory or (without RoPE) the context, a logit is NaN, or
            the filters remove every token.
    """
    check_lm(lm)
    [params] = make_settings(with_defaults(lm.tokenizer, sampling), SamplingParams)
    request = read_request(lm, [prompt], TextParams(max_new_tokens=1))
    text = left_pad(request.inputs, buffer_sizes(request.inputs, request.limits))
    sampler = request.make_sampler(params, as_filters(filters))
    compute = jax.jit(partial(_next_logits, sampler.model))
    with request.on_device():
        logits_11V = compute(request.lm.params, text)
    key_1 = row_keys(key, 1)
    return explain_choice(logits_11V[:, -1], text, params, key_1[0], custom=sampler.filters)


def explain_choice(
    logits_1V: jax.Array,
    text: TokenBuffer,
    sampling: SamplingParams,
    key: jax.Array,
    index: int = 0,
    custom: Sequence[Filter] = (),
) -> Choice:
    """Sample the new token at `index` of a row like `sample_token`, and record each stage.

    Raises `UserError` if a logit is NaN, or the filters remove every token.
    """
    if np.isnan(np.asarray(logits_1V)).any():
        raise UserError(DIVERGED)
    probability_V = _probability(logits_1V)
    effects = []
    for name, after_1V in stages(logits_1V, text, sampling, custom):
        if np.isnan(np.asarray(after_1V)).any():
            raise UserError(f"{name} returns NaN: correct the filter")
        if np.isneginf(np.asarray(after_1V)).all():
            raise UserError(f"{name} forbids every token: filter fewer tokens, or set no_repeat_ngram_size to 0")
        effects.append(_effect(name, probability_V, after_1V))
        probability_V = _probability(after_1V)
        logits_1V = after_1V

    if sampling.draws:
        uniform_1 = jax.jit(row_uniform)(key[None], index)
        uniform = float(uniform_1[0])
        token = int(jax.jit(inverse_cdf_sample)(logits_1V, uniform_1)[0])
    else:
        uniform = None
        token = int(probability_V.argmax())
    return Choice(
        stages=effects,
        probability_V=probability_V,
        uniform=uniform,
        before=float(probability_V[:token].sum()),
        token=token,
        key=[int(x) for x in jax.random.key_data(key).reshape(-1)],
    )


def _effect(name: str, before_V: np.ndarray, after_1V: jax.Array) -> Stage:
    """Compare the probabilities before a filter with the logits after it."""
    after_V = _probability(after_1V)
    gone_V = (before_V > 0) & np.isneginf(np.asarray(after_1V)[0])
    lost = float(before_V[gone_V].sum())

    # The total variation distance to the renormalized probabilities before the filter: half the L1 distance.
    kept_V = np.where(gone_V, 0.0, before_V)
    total = max(kept_V.sum(), 1e-300)  # 0 if the remaining tokens had no probability
    moved = float(np.abs(after_V - kept_V / total).sum() / 2)
    return Stage(
        name=name,
        removed=int(gone_V.sum()),
        removed_mass=lost,
        moved_mass=moved,
        left=int((after_V > 0).sum()),
    )


def _next_logits(model: GPT, params: Any, text: TokenBuffer) -> jax.Array:
    """Return the logits after the last token of each prompt, `[B, 1, V]`, computed with the cache as in generation."""
    cache = read_prompts(model, params, text, text.ids_BS.shape[1])
    logits_B1V, _ = extend(model, params, text.last(1).ids_BS, cache)
    return logits_B1V


def _probability(logits_1V: jax.Array) -> np.ndarray:
    """Compute the softmax; infinite logits share the probability equally."""
    logits_V = np.asarray(logits_1V, np.float64)[0]
    if np.isposinf(logits_V).any():
        weight_V = np.isposinf(logits_V).astype(np.float64)
    else:
        weight_V = np.exp(logits_V - logits_V.max())
    return weight_V / weight_V.sum()
