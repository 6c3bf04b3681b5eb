"""The arrays of an inspection of a text, computed in one program on the devices of the model."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.lm import LM
from jaxgpt.lm.buffers import round_up
from jaxgpt.lm.sampler import OnlyIds, only_text
from jaxgpt.model import GPT
from jaxgpt.model.params import count_parameters
from jaxgpt.study.activation_names import layer_names, stream_names
from jaxgpt.study.interventions import sweep
from jaxgpt.study.lens import compute_lens
from jaxgpt.study.observer import forward
from jaxgpt.study.token_ids import on_tokens
from jaxgpt.train.loss import log_likelihood

ABLATION = 10**12  # maximum FLOPs of ablating each head in turn: about a minute on two cores


class InspectedArrays(NamedTuple):
    """The arrays of an inspection at P positions: the tokens of a text and, during the computation, padding.

    They are JAX arrays during the computation, and NumPy arrays on the host.
    """

    log_p_PV: Any  # log probabilities of the next token
    stream_LPD: Any  # residual stream: the input of each block, and the output of the last block
    attention_LNPP: Any  # attention weights
    lens_LP: Any  # most probable ids of the logit lens
    lens_p_LP: Any  # probabilities of `lens_LP`
    loss_increase_LN: Any  # increase of the loss per token with each head ablated; None: not computed

    def without_padding(self, length: int) -> InspectedArrays:
        """Return the arrays of the first `length` positions."""
        return InspectedArrays(
            log_p_PV=self.log_p_PV[:length],
            stream_LPD=self.stream_LPD[:, :length],
            attention_LNPP=self.attention_LNPP[:, :, :length, :length],
            lens_LP=self.lens_LP[:, :length],
            lens_p_LP=self.lens_p_LP[:, :length],
            loss_increase_LN=self.loss_increase_LN,
        )


def compute_arrays(lm: LM, ids: list[int], limit: int) -> InspectedArrays:
    """Compute the arrays of an inspection on the devices of the model, and copy them to the host.

    Args:
        lm: the model.
        ids: ids of the text.
        limit: maximum number of ids of a text.
    """
    # Pad the text to a power of two, within the limit: texts of similar lengths share a compiled program, unless heads are
    # ablated only in the shorter texts.
    length = len(ids)
    size = min(limit, round_up(length, 8))
    padded_1P = np.pad([ids], ((0, 0), (0, size - length)))

    model = lm.config.model
    ablation_flops = 2 * count_parameters(lm.gpt) * length * model.n_layer * model.n_head
    ablate = length > 1 and ablation_flops <= ABLATION  # a text of one token has no loss
    found: InspectedArrays = jax.device_get(on_tokens(_compute, lm, padded_1P, np.int32(length), only_text(lm), ablate))
    return found.without_padding(length)


@partial(jax.jit, static_argnums=(0, 4, 5))
def _compute(
    model: GPT, params: Any, tokens_1P: jax.Array, length: jax.Array, only: OnlyIds, ablate: bool
) -> InspectedArrays:
    stream = stream_names(model.config)
    patterns = layer_names(model.config, "attn.pattern")
    out = forward(model, params, tokens_1P, (*stream, *patterns))
    lens = compute_lens(model, params, tokens_1P, k=1, only=only)
    return InspectedArrays(
        log_p_PV=jax.nn.log_softmax(only(out.logits)[0]),
        stream_LPD=jnp.stack([out.taps[name][0] for name in stream]),
        attention_LNPP=jnp.stack([out.taps[name][0] for name in patterns]),
        lens_LP=lens.ids[:, 0, :, 0],
        lens_p_LP=lens.probabilities[:, 0, :, 0],
        loss_increase_LN=_ablated(model, params, tokens_1P, length, only) if ablate else None,
    )


def _ablated(model: GPT, params: Any, tokens_1P: jax.Array, length: jax.Array, only: OnlyIds) -> jax.Array:
    """Compute the increase of the mean loss of a text with each head ablated, `[L, N]`."""
    config = model.config
    P = tokens_1P.shape[1]

    def loss(logits_1PV: jax.Array) -> jax.Array:
        """Compute the mean loss of the tokens from the second to the last."""
        log_p_1P = log_likelihood(only(logits_1PV), jnp.roll(tokens_1P, -1, 1))
        has_next_P = jnp.arange(P) < length - 1
        return -log_p_1P.mean(where=has_next_P[None])

    outputs = tuple(layer_names(config, "attn.head_out"))
    zeros_1PNH = jnp.zeros((1, P, config.n_head, config.head_width), model.ops.dtype)
    zeros = (zeros_1PNH,) * config.n_layer
    found = sweep(model, params, tokens_1P, zeros, outputs, axis=2, metric=loss)
    return found.edited - found.unedited
