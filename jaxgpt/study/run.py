"""Read and edit activations by name, in a forward pass and in generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import SamplingParams, TextParams
from jaxgpt.decoding import TokenBuffer, sample_token
from jaxgpt.decoding.sampling import Sampled
from jaxgpt.lm import LM, Generation
from jaxgpt.lm.arguments import make_settings, row_keys
from jaxgpt.lm.defaults import with_defaults
from jaxgpt.lm.model import check_lm
from jaxgpt.lm.request import Request, read_request
from jaxgpt.lm.results import generation_of
from jaxgpt.lm.sampler import OnlyIds, only_text
from jaxgpt.lm.text import TextStream
from jaxgpt.options import SEED
from jaxgpt.study.activation_names import hidden_names, layer_names
from jaxgpt.study.observer import ActivationEdit, ForwardPass, forward, observed
from jaxgpt.study.token_ids import on_tokens

_forward = jax.jit(forward, static_argnums=(0, 3, 4))


def names(lm: LM, shape: tuple[int, int] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """List the activations of a model in the order in which they are computed, with shapes and dtypes.

    `shape` is the `(B, T)` of the ids; None: one row of the context length.
    """
    check_lm(lm)
    tokens = jax.ShapeDtypeStruct(shape or (1, lm.config.model.block_size), jnp.int32)
    tap_all = partial(forward, observed(lm), taps=("*",))
    out: Any = jax.eval_shape(tap_all, lm.params, tokens)
    return dict(out.taps)


def run(
    lm: LM, ids: Any, taps: str | Sequence[str] = (), edits: Mapping[str, ActivationEdit] | None = None
) -> ForwardPass:
    """Compute logits and activations in one forward pass, with edits of activations.

    An edit is a pure function of an activation, traced with the model: `{"h.3.mlp.out": lambda x: 0 * x}`. Attention uses the
    reference implementation, which exposes its scores and pattern. The result is differentiable, including with respect to
    arrays that an edit closes over, and `run` can be called under `jax.vmap`, `jax.grad` and `jax.jit`. Programs are cached by
    the identity of the edits: define each edit once, or call `run` in a jitted function of the values that change.

    Args:
        lm: the model. Quantized weights are dequantized to float32, and stacked weights are unstacked.
        ids: a text, or token ids as an integer array `[B, T]` or nested lists.
        taps: names of activations to return, or one name, as `names(lm)` lists them. `*` matches any part of a name:
            `h.*.attn.pattern`.
        edits: dict of functions, keyed by activation name, which may also contain `*`.

    Raises:
        UserError: if a name matches no activation, an edit changes a shape or dtype, or the ids are not integers
            `[B, T]` within the vocabulary and context length.
    """
    taps = (taps,) if isinstance(taps, str) else tuple(taps)
    return on_tokens(_forward, lm, ids, taps, tuple((edits or {}).items()))


class Captured(NamedTuple):
    """Logits, hidden states and attention maps of one forward pass, as in transformers.

    Attributes:
        logits: `[B, T, V]`.
        hidden: L + 1 arrays `[B, T, D]`: the input of the first block, then the output of each block, the last after the
            final norm, if any. In transformers, these are the `hidden_states`.
        attentions: L arrays `[B, N, T, T]`, float32: rows sum to 1 and are 0 above the diagonal.
    """

    logits: jax.Array
    hidden: tuple[jax.Array, ...]
    attentions: tuple[jax.Array, ...]


def capture(lm: LM, ids: Any) -> Captured:
    """Compute the logits, hidden states and attention maps of a text or ids `[B, T]`; errors as in `run`."""
    check_lm(lm)
    hidden = hidden_names(lm.config.model)
    attentions = layer_names(lm.config.model, "attn.pattern")
    logits, taps = run(lm, ids, [*hidden, *attentions])
    return Captured(
        logits=logits,
        hidden=tuple(taps[name] for name in hidden),
        attentions=tuple(taps[name] for name in attentions),
    )


class Generated(NamedTuple):
    """A generated text with its activations.

    Attributes:
        ids: the ids of the prompt and of the generated text.
        generation: text, ids and finish reason of the generated part, as from `jaxgpt.generate`.
        logits: `[1, T, V]`, at each of the ids; the last id is omitted if its position exceeds the context.
        taps: dict of the requested activations, keyed by name, at the same ids.
    """

    ids: list[int]
    generation: Generation
    logits: jax.Array
    taps: dict[str, jax.Array]


def generate(
    lm: LM,
    prompt: str | Sequence[int],
    taps: str | Sequence[str] = (),
    edits: Mapping[str, ActivationEdit] | None = None,
    *,
    key: int | jax.Array = SEED,
    **settings: Any,
) -> Generated:
    """Continue a prompt with edits of activations, and return activations of the whole text.

    No KV cache is used: each token is sampled from a forward pass over the text so far, padded to the final length.
    An edit therefore receives all positions in one call, as in `run`.

    Args:
        prompt: a text or ids.
        taps: names of activations to return, as for `run`.
        edits: as for `run`.
        key: random key of the samples: a seed or a `jax.random.key`.
        **settings: fields of `TextParams` (`overflow` and `lookup` have no effect) and `SamplingParams`.

    Raises:
        UserError: as in `jaxgpt.generate`, in `run` for taps and edits, or if prompt and new tokens exceed the context length.
    """
    check_lm(lm)
    params, sampling = make_settings(with_defaults(lm.tokenizer, settings), TextParams, SamplingParams)
    request = read_request(lm, [prompt], replace(params, overflow="error"))
    text = _continue(lm, request, edits, row_keys(key, 1), sampling)

    [prompt_ids] = request.inputs
    ids = prompt_ids + text.ids
    logits, activations = run(lm, [ids[: lm.config.model.block_size]], taps, edits)
    return Generated(ids, generation_of(text), logits, activations)


def _continue(
    lm: LM,
    request: Request,
    edits: Mapping[str, ActivationEdit] | None,
    key_1: jax.Array,
    sampling: SamplingParams,
) -> TextStream:
    """Sample the new tokens of a request with one row, until its text is finished."""
    [prompt_ids] = request.inputs
    [max_new] = request.limits
    text = request.text_stream(0)
    only = only_text(lm)

    # The buffer has room for all new tokens, so that all forward passes share a compiled program.
    ids_1S = jnp.pad(jnp.asarray([prompt_ids]), ((0, 0), (0, max_new)))
    so_far = TokenBuffer(ids_1S, jnp.int32(len(prompt_ids)))
    for n_new in range(max_new):
        ids_1T = so_far.ids_BS[:, : lm.config.model.block_size]
        logits_1TV = run(lm, ids_1T, (), edits).logits
        last = len(prompt_ids) + n_new - 1
        last_11V = jax.lax.dynamic_slice_in_dim(logits_1TV, last, 1, axis=1)  # one program for all positions
        last_11V = jax.device_get(last_11V)  # the logits may be sharded over the mesh of the model
        sampled = _next_token(last_11V, so_far, key_1, n_new, sampling, only)

        text.add(sampled.token_B.tolist(), sampled.log_p_B.tolist())
        if text.finish_reason:
            break
        so_far = so_far.append(sampled.token_B[:, None])
    return text


@partial(jax.jit, static_argnums=(4, 5))
def _next_token(
    logits_11V: jax.Array, so_far: TokenBuffer, key_1: jax.Array, n_new: int, sampling: SamplingParams, only: OnlyIds
) -> Sampled:
    """Sample the new token with index `n_new` from the logits of the last token."""
    return sample_token(logits_11V[:, 0], so_far, key_1, jnp.int32(n_new), sampling, (only,))
