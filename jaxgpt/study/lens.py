"""Read the residual stream as logits (nostalgebraist 2020), and attribute a logit to model parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.lm.sampler import OnlyIds, only_text
from jaxgpt.model import GPT
from jaxgpt.settings import as_int
from jaxgpt.study.activation_names import layer_names, stream_names
from jaxgpt.study.observer import forward
from jaxgpt.study.token_ids import as_tokens, on_tokens

UNKNOWN = -1  # answer of the logit lens before the last block's output is read; ids are at least 0


class Lens(NamedTuple):
    """The logit lens: the next token as predicted from each layer's residual stream.

    Layer l is the input of block l; layer L is the output of the last block, which gives the model's prediction.

    Attributes:
        ids: the k most probable tokens, `[L + 1, B, T, k]`.
        probabilities: probabilities of `ids`, `[L + 1, B, T, k]`.
        answer: the model's most probable token, `[B, T]`.
        rank: rank of the answer, 1 for the most probable token, `[L + 1, B, T]`.
        first: the first layer at which the answer is the most probable token, `[B, T]`.
    """

    ids: jax.Array
    probabilities: jax.Array
    answer: jax.Array
    rank: jax.Array
    first: jax.Array


def lens(lm: LM, ids: Any, k: int = 5) -> Lens:
    """Apply the final norm and the head to the input of each block and to the output of the last block.

    Ids without a text have probability 0, as in generation.

    Args:
        ids: a text, or ids `[B, T]`.
        k: number of most probable tokens to return.

    Raises:
        UserError: as in `run`, or if k is not between 1 and the vocabulary size.
    """
    tokens_BT = as_tokens(lm, ids)
    k = as_int("k", k, 1, lm.config.model.vocab_size)
    return on_tokens(_jitted_lens, lm, tokens_BT, k, only_text(lm))


def compute_lens(model: GPT, params: Any, tokens_BT: jax.Array, k: int, only: OnlyIds) -> Lens:
    """Compute `lens` of checked ids within a jitted function."""
    names = tuple(stream_names(model.config))
    last = names[-1]
    out = forward(model, params, tokens_BT, names)

    # The scan reads the last block's output first: its most probable tokens are the answer, which the other layers rank. The
    # program is the same for all layers: in bfloat16, a different program may return a different answer.
    def read(answer_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        # The blocks before the edit do not affect the logits, so the compiler removes them.
        logits_BTV = forward(model, params, tokens_BT, (), ((last, _replace_with(x_BTD)),)).logits
        logits_BTV = only(logits_BTV)
        _, ids_BTk = jax.lax.top_k(logits_BTV, k)
        is_unknown_BT = answer_BT < 0
        answer_BT = jnp.where(is_unknown_BT, ids_BTk[..., 0], answer_BT)
        answer_BT1 = jnp.take_along_axis(logits_BTV, answer_BT[..., None], -1)
        probability_BTk = jnp.take_along_axis(jax.nn.softmax(logits_BTV), ids_BTk, -1)
        rank_BT = 1 + (logits_BTV > answer_BT1).sum(-1)
        return answer_BT, (ids_BTk, probability_BTk, rank_BT)

    unknown_BT = jnp.full(tokens_BT.shape, UNKNOWN, jnp.int32)
    stream = jnp.stack([out.taps[name] for name in names])
    answer_BT, (ids, probabilities, rank) = jax.lax.scan(read, unknown_BT, stream, reverse=True)
    first_BT = jnp.argmax(rank == 1, 0)
    return Lens(ids, probabilities, answer_BT, rank, first_BT)


_jitted_lens = jax.jit(compute_lens, static_argnums=(0, 3, 4))


def _replace_with(value: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Return an edit that replaces an activation with `value`."""

    def edit(_: jax.Array) -> jax.Array:
        return value

    return edit


class Attribution(NamedTuple):
    """Parts of one logit per row: `embed + position + heads.sum((0, 2)) + mlps.sum(0) + bias`.

    Attributes:
        logit: the logit (with `logit_softcap`, before the cap), `[B]`.
        embed: direct contribution of the token embedding, `[B]`.
        position: direct contribution of the position embedding, `[B]`; 0 without position embeddings.
        heads: direct contribution of each head, `[L, B, N]`.
        mlps: direct contribution of each MLP, `[L, B]`; 0 without MLPs.
        bias: contribution of the biases of attention outputs, norms and head, `[B]`.
    """

    logit: jax.Array
    embed: jax.Array
    position: jax.Array
    heads: jax.Array
    mlps: jax.Array
    bias: jax.Array

    def total(self) -> jax.Array:
        """Return the sum of the parts, which equals the logit up to rounding."""
        return self.embed + self.position + self.heads.sum((0, 2)) + self.mlps.sum(0) + self.bias


def attribution(lm: LM, ids: Any, answer: int | Sequence[int] | None = None, position: int = -1) -> Attribution:
    """Compute the direct contribution of each head and MLP to a logit, with the scales of all norms held fixed.

    Scales are normalizing factors, not gains. With fixed scales and without the responses of later layers, the logit is affine
    in the outputs of embeddings, heads and MLPs. A part's contribution is its value times the gradient; the bias is the logit
    if all parts are zero. For the difference of two logits, subtract two attributions. Source: Elhage et al. 2021.

    Args:
        ids: a text, or ids `[B, T]`.
        answer: the id of the attributed logit, or one id per row; None: the most probable id.
        position: the position of the logit; negative: counted from the end.

    Raises:
        UserError: as in `run`, or if an answer or the position is out of range, or the number of answers is wrong.
    """
    tokens_BT = as_tokens(lm, ids)
    B, T = tokens_BT.shape
    at = as_int("position", position, -T, T - 1) % T
    answer_B = None if answer is None else answer_ids(lm.config.model.vocab_size, answer, B)
    return on_tokens(_attribution, lm, tokens_BT, answer_B, at, only_text(lm))


@partial(jax.jit, static_argnums=(0, 5))
def _attribution(
    model: GPT, params: Any, tokens_BT: jax.Array, answer_B: jax.Array | None, at: jax.Array, only: OnlyIds
) -> Attribution:
    """Compute `attribution` of checked arguments to the logit at position `at`."""
    model = model.clone(config=replace(model.config, logit_softcap=0.0))
    heads = layer_names(model.config, "attn.head_out")
    mlps = layer_names(model.config, "mlp.out")
    out = forward(model, params, tokens_BT, ("*",))
    scales = {name: x for name, x in out.taps.items() if name.endswith(".scale")}
    parts = {name: out.taps[name] for name in ("embed", "pos_embed", *heads, *mlps) if name in out.taps}
    if answer_B is None:
        answer_B = jnp.argmax(jnp.take(only(out.logits), at, axis=1), -1)

    def logit_of(parts: dict[str, jax.Array]) -> jax.Array:
        edits = tuple((name, _replace_with(x)) for name, x in (scales | parts).items())
        logits_BTV = forward(model, params, tokens_BT, (), edits).logits
        logits_BV = jnp.take(logits_BTV, at, axis=1)
        return jnp.take_along_axis(logits_BV, answer_B[:, None], -1)[:, 0]

    gradients = jax.grad(lambda parts: logit_of(parts).sum())(parts)
    if "pos_embed" in parts:  # `[1, T, D]`, added to the embedding
        gradients["pos_embed"] = gradients["embed"]

    def contribution(name: str, axes: tuple[int, ...] = (1, 2)) -> jax.Array:
        if name not in parts:
            return jnp.zeros(len(tokens_BT))
        return (gradients[name].astype(jnp.float32) * parts[name]).sum(axes)

    return Attribution(
        logit=logit_of(parts),
        embed=contribution("embed"),
        position=contribution("pos_embed"),
        heads=jnp.stack([contribution(name, (1, 3)) for name in heads]),
        mlps=jnp.stack([contribution(name) for name in mlps]),
        bias=logit_of(jax.tree.map(jnp.zeros_like, parts)),
    )


def answer_ids(V: int, answer: Any, rows: int) -> jax.Array:
    """Convert one id, or one id per row, to int32 `[B]`.

    Raises `UserError` for a wrong number of ids, or an id outside the vocabulary.
    """
    ids = np.asarray(answer).reshape(-1).tolist()
    if len(ids) not in (1, rows):
        raise UserError(f"{len(ids)} answers for {rows} rows of ids: pass one answer, or one answer per row")
    ids = [as_int("an answer", i, 0, V - 1) for i in ids]
    return jnp.asarray(ids * (rows // len(ids)), jnp.int32)
