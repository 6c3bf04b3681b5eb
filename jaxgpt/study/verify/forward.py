"""Laws of the forward pass: cache, batches, loops, causality, the tied head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.decoding import Model, SamplingParams, TokenBuffer, engine, sample_token
from jaxgpt.decoding.sampler import RowLimits, decode_steps, prefill
from jaxgpt.model import KVCache, init_cache
from jaxgpt.study.verify.subject import Skipped, Subject, distance


def _decoder(s: Subject) -> Model:
    """The model as decoding knows it, under names of its own: nothing that was compiled before is found again."""
    model = s.model

    def extend(params: Any, tokens_BT: jax.Array, cache: KVCache, last: bool) -> tuple[jax.Array, KVCache]:
        extended: Any = model.apply({"params": params}, tokens_BT, cache, last, method="extend")
        return extended

    return Model(extend, lambda start_B, size: init_cache(s.model_config, start_B, size))


def cached(s: Subject) -> float:
    """Logits with a cache are those of one pass over everything: a third of the tokens at once, a third one by one, the
    rest at once."""
    T, model = s.length, _decoder(s)
    extend = jax.jit(model.extend, static_argnums=3)
    cache, parts = model.cache(jnp.zeros(2, jnp.int32), T + 3), []
    first, second = max(T // 3, 1), max(2 * T // 3, 1)
    for begin_, end in [(0, first), *((t, t + 1) for t in range(first, second)), (second, T)]:
        if begin_ < end:
            logits, cache = extend(s.params, s.tokens[:, begin_:end], cache, False)
            parts.append(np.asarray(logits))
    return distance(np.concatenate(parts, 1), s.forward(s.params, s.tokens))


def ragged(s: Subject) -> float:
    """Prompts of different length in one batch have the logits that each has alone, without cache or company."""
    if s.length < 2:
        raise Skipped("the context holds one token")
    prompts = [np.asarray(s.tokens[0]).tolist(), np.asarray(s.tokens[1, : max(s.length // 3, 1)]).tolist()]
    ids_BP, start_B = engine.left_pad(prompts, s.model_config.block_size)
    model = _decoder(s)
    extend = jax.jit(model.extend, static_argnums=3)
    logits, _ = extend(s.params, jnp.asarray(ids_BP), model.cache(jnp.asarray(start_B), ids_BP.shape[1]), False)
    together = [np.asarray(logits[row, ids_BP.shape[1] - len(ids) :]) for row, ids in enumerate(prompts)]
    alone = [np.asarray(s.forward(s.params, jnp.asarray([ids], jnp.int32))[0]) for ids in prompts]
    return max(distance(a, b) for a, b in zip(together, alone, strict=True))


def loop(s: Subject) -> float:
    """The sampler's loop on the device draws the tokens, and fills the cache, as the same steps written out one by one."""
    if s.length < 3:
        raise Skipped("the context holds no prompt and two new tokens")
    P = s.length // 2
    new = s.length - P
    model, sampling = _decoder(s), SamplingParams(temperature=0.8, top_k=min(8, s.model_config.vocab_size))
    text = TokenBuffer(s.tokens[:, :P], jnp.zeros(2, jnp.int32), jnp.int32(P))
    rows = RowLimits(jax.random.split(jax.random.key(0), 2), jnp.full(2, new, jnp.int32))

    def run(params: Any) -> Any:
        state = prefill(params, text, rows, P + new, P + new, model, sampling, ())
        return decode_steps(params, state, rows, jnp.int32(new - 1), model, sampling, ())

    looped = jax.jit(run)(s.params)
    extend = jax.jit(model.extend, static_argnums=3)
    ids, cache, tokens = text.ids_BS, model.cache(text.start_B, P + new), text.ids_BS
    for made in range(new):
        logits, cache = extend(s.params, tokens, cache, True)
        past = TokenBuffer(ids, text.start_B, jnp.int32(P + made))
        tokens = sample_token(logits[:, -1], past, rows.key_B, jnp.int32(made), sampling)[:, None]
        ids = jnp.concatenate([ids, tokens], 1)
    if (looped.text.ids_BS != ids).any():
        return float("inf")
    return distance(looped.cache, cache)


def leak(s: Subject) -> float:
    """Another token at t changes no logit before t, not by one bit: one program, two inputs. It does change those at t."""
    if s.length < 2:
        raise Skipped("the context holds one token")
    places = (s.length // 2, s.length - 1)
    tokens = np.array(s.tokens)
    for row, t in enumerate(places):
        tokens[row, t] = (tokens[row, t] + 1) % s.model_config.vocab_size
    before, after = (np.asarray(s.forward(s.params, jnp.asarray(ids))) for ids in (s.tokens, tokens))
    if any((before[row, t] == after[row, t]).all() for row, t in enumerate(places)):
        raise RuntimeError("another token changes nothing at all: these weights do not read their input")
    return max(distance(after[row, :t], before[row, :t]) for row, t in enumerate(places))


def tied(s: Subject) -> float:
    """The head is the token table: logits are the last hidden states times it, and the rows of tokens that do not occur in
    the text have the gradient that this product gives them, and no other."""
    c = s.model_config
    if not c.tie_embeddings:
        raise Skipped("model.tie_embeddings is off: the head has weights of its own")
    model, ids = s.model, s.random_ids((2, s.length), below=max(c.vocab_size // 2, 1))
    weigh = jax.random.normal(jax.random.key(0), (*ids.shape, c.vocab_size))
    hidden_BTD = model.apply({"params": s.params}, ids, method=lambda m, ids: m.stack(m.embed(ids))[0])

    def whole(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = s.params | {"wte": s.params["wte"] | {"embedding": table}}
        logits: Any = model.apply({"params": params}, ids)
        return (logits * weigh).sum(), logits

    def product(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("BTD,VD->BTV", hidden_BTD, table)
        logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap) if c.logit_softcap else logits
        return (logits * weigh).sum(), logits

    table = s.params["wte"]["embedding"]
    slopes, logits = zip(*(jax.jit(jax.grad(f, has_aux=True))(table) for f in (whole, product)), strict=True)
    unused = slice(max(c.vocab_size // 2, 1), None)
    return max(distance(*logits), distance(*(slope[unused] for slope in slopes)))
