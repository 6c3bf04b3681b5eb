"""Attribution: the direct contributions of the parts of a model to a logit (Elhage et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.lm import LM
from jaxgpt.lm.sampler import OnlyIds, only_text
from jaxgpt.model import GPT
from jaxgpt.settings import as_int
from jaxgpt.study.activation_names import layer_names
from jaxgpt.study.observer import forward, replace_with
from jaxgpt.study.token_ids import answer_ids, as_tokens, on_tokens


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
        edits = tuple((name, replace_with(x)) for name, x in (scales | parts).items())
        logits_BTV = forward(model, params, tokens_BT, (), edits).logits
        logits_BV = jnp.take(logits_BTV, at, axis=1)
        return jnp.take_along_axis(logits_BV, answer_B[:, None], -1)[:, 0]

    gradients = jax.grad(lambda parts: logit_of(parts).sum())(parts)
    if "pos_embed" in parts:
        # Position embeddings `[1, T, D]` are added to the token embeddings of each row, so both have the same gradient.
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
