"""Laws of the forward pass: cache, padding, the sampler's loop, causality, documents, the tied head."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.decoding import Sampler, SamplingParams, TokenBuffer, sample_token
from jaxgpt.decoding.sampler import decode_steps, extend, prefill, read_prompts
from jaxgpt.lm import buffers
from jaxgpt.model import GPT, KVCache
from jaxgpt.ops.attention import document_positions
from jaxgpt.verify.subject import NotApplicable, Subject, distance


def prompt_logits(model: GPT, params: Any, ids_BT: jax.Array, slots: int) -> tuple[jax.Array, KVCache]:
    """Return the logits of prompts, and their cache with `slots` slots."""
    result: Any = model.apply({"params": params}, ids_BT, slots, method=GPT.prefill)
    return result


def cached(s: Subject) -> float:
    """Compare logits computed with the cache to the logits of one full pass.

    The first third of the tokens takes one call, the second third one call per token, and the remainder one call.
    """
    T = s.length
    first = max(T // 3, 1)
    second = max(2 * T // 3, 1)
    single_tokens = [(t, t + 1) for t in range(first, second)]

    read = jax.jit(partial(prompt_logits, s.model), static_argnums=2)
    then = jax.jit(partial(extend, s.model))
    logits, cache = read(s.params, s.tokens[:, :first], T + 3)
    parts = [np.asarray(logits)]
    for begin, end in [*single_tokens, (second, T)]:
        if begin < end:
            logits, cache = then(s.params, s.tokens[:, begin:end], cache)
            parts.append(np.asarray(logits))
    return distance(np.concatenate(parts, 1), s.forward(s.params, s.tokens))


def padded(s: Subject) -> float:
    """Compare logits of left-padded prompts of different lengths to the logits of each prompt alone."""
    shorter = max(s.length // 3, 1)
    prompts = [np.asarray(s.tokens[0]).tolist(), np.asarray(s.tokens[1, :shorter]).tolist()]
    text = buffers.left_pad(prompts, buffers.buffer_sizes(prompts, [0, 0]))
    P = text.ids_BS.shape[1]
    read = jax.jit(partial(prompt_logits, s.model), static_argnums=2)
    logits, _ = read(s.params, text.ids_BS, P)

    differences = []
    for row, ids in enumerate(prompts):
        together = logits[row, P - len(ids) :]
        alone = s.forward(s.params, jnp.asarray([ids], jnp.int32))[0]
        differences.append(distance(np.asarray(together), np.asarray(alone)))
    return max(differences)


def sampler_loop(s: Subject) -> float:
    """Compare the sampler's on-device loop with the same steps run from Python: tokens and cache."""
    P = s.length // 2
    new = s.length - P
    sampling = SamplingParams(temperature=0.8, top_k=min(8, s.config.model.vocab_size))
    sampler = Sampler(s.model, sampling)
    text = TokenBuffer(s.tokens[:, :P], jnp.int32(P))
    keys_2 = jax.random.split(jax.random.key(0), 2)

    def run(params: Any) -> Any:
        state = prefill(sampler, params, text, keys_2, P + new)
        return decode_steps(sampler, params, state, jnp.int32(new))

    looped = jax.jit(run)(s.params)

    # The same steps from Python.
    read = jax.jit(partial(read_prompts, s.model), static_argnums=2)
    then = jax.jit(partial(extend, s.model))
    cache = read(s.params, text, P + new)
    text = text._replace(ids_BS=jnp.pad(text.ids_BS, ((0, 0), (0, new))))
    for made in range(new):
        logits, cache = then(s.params, text.last(1).ids_BS, cache)
        sampled = sample_token(logits[:, -1], text, keys_2, jnp.int32(made), sampling)
        text = text.append(sampled.token_B[:, None])
    return distance((looped.text.ids_BS, looped.cache), (text.ids_BS, cache))


def causal(s: Subject) -> float:
    """Compare the logits before position t with and without a change of the token at t.

    Raises `RuntimeError` if the logits at t do not change.
    """
    positions = (s.length // 2, s.length - 1)
    tokens = np.array(s.tokens)
    for row, t in enumerate(positions):
        tokens[row, t] = (tokens[row, t] + 1) % s.config.model.vocab_size
    before = np.asarray(s.forward(s.params, jnp.asarray(s.tokens)))
    after = np.asarray(s.forward(s.params, jnp.asarray(tokens)))

    for row, t in enumerate(positions):
        if (before[row, t] == after[row, t]).all():
            raise RuntimeError("changing a token does not change its own logits: the model ignores its input")
    return max(distance(after[row, :t], before[row, :t]) for row, t in enumerate(positions))


def documents(s: Subject) -> float:
    """Compare logits of two documents packed into one row to the logits of each document alone."""
    cut = max(s.length // 3, 1)
    is_second = jnp.broadcast_to(jnp.arange(s.length) >= cut, s.tokens.shape)
    positions = document_positions(is_second.astype(jnp.int32))
    packed = jax.jit(lambda params: s.model.apply({"params": params}, s.tokens, None, positions))
    together = packed(s.params)
    alone = [np.asarray(s.forward(s.params, ids)) for ids in (s.tokens[:, :cut], s.tokens[:, cut:])]
    return distance(np.asarray(together), np.concatenate(alone, 1))


def tied(s: Subject) -> float:
    """Compare logits, and the gradient of the token table E, to the values computed from `hidden @ E.T`.

    The gradient is compared only in rows of tokens outside the input: other rows also have a gradient from the lookup.
    """
    c = s.config.model
    if not c.tie_embeddings:
        raise NotApplicable("model.tie_embeddings is false: the head has its own weights")
    model = s.model
    first_unused = max(c.vocab_size // 2, 1)
    ids = s.random_ids((2, s.length), below=first_unused)
    weigh = jax.random.normal(jax.random.key(0), (*ids.shape, c.vocab_size))

    def hidden(params: Any) -> jax.Array:
        result: Any = model.apply({"params": params}, ids, method="hidden_and_sides")
        x_BTD: jax.Array
        x_BTD, _ = result
        return x_BTD

    hidden_BTD = jax.jit(hidden)(s.params)

    def whole(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = s.params | {"wte": s.params["wte"] | {"embedding": table}}
        logits: Any = model.apply({"params": params}, ids)
        return (logits * weigh).sum(), logits

    def product(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("BTD,VD->BTV", hidden_BTD, table)
        if c.logit_softcap:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        return (logits * weigh).sum(), logits

    table = s.params["wte"]["embedding"]
    whole_gradient, whole_logits = jax.jit(jax.grad(whole, has_aux=True))(table)
    gradient, logits = jax.jit(jax.grad(product, has_aux=True))(table)
    of_gradients = distance(whole_gradient[first_unused:], gradient[first_unused:])
    return max(distance(whole_logits, logits), of_gradients)
