"""The sampler of a model: its filters, and its weights as decoding reads them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.checkpoint.match import check_names
from jaxgpt.decoding import Sampler, SamplingParams, TokenBuffer
from jaxgpt.kernels import of_device
from jaxgpt.lm.model import LM, check_lm
from jaxgpt.lm.placement import block_on_mesh
from jaxgpt.model.params import map_matrices
from jaxgpt.model.scan import per_layer
from jaxgpt.ops import Ops


def sampler_of(
    lm: LM, sampling: SamplingParams | None = None, stop_ids: tuple[int, ...] = (), ops: Ops | None = None
) -> Sampler:
    """Return a model's sampler; by default, `ops` comes from `of_device` for the first local device."""
    ops = of_device(jax.local_devices()[0], lm.config.train.compute_dtype) if ops is None else ops
    only = only_text(lm)
    filters = (only,) if only.kept else ()
    return Sampler(lm.model(lm.config.model, ops), sampling or SamplingParams(), stop_ids, filters)


@dataclass(frozen=True)
class OnlyIds:
    """A filter that removes ids from the vocabulary; equal filters share compiled programs."""

    kept: bytes  # one byte per id, 0: removed; empty: keep all ids. Bytes are hashable, unlike arrays.
    __name__ = "ids with text"  # for `filter_name`

    def __call__(self, logits: jax.Array, text: TokenBuffer | None = None) -> jax.Array:
        """Set the logits of removed ids to -inf, `[..., V]`."""
        return jnp.where(np.frombuffer(self.kept, np.bool_), logits, -jnp.inf) if self.kept else logits


def only_text(lm: LM) -> OnlyIds:
    """Return a filter that removes ids without text, such as the padding of a vocabulary."""
    found = lm.tokenizer.has_text(lm.config.model.vocab_size)
    return OnlyIds(b"" if found.all() else found.tobytes())


def for_decoding(lm: LM) -> LM:
    """Check that an argument is an LM, and prepare its weights: unstacked and converted.

    Float32 matrices and tables get the compute dtype, so that steps do not convert them again; the logits are bit-for-bit
    unchanged.
    """
    check_lm(lm)
    dtype = lm.config.train.compute_dtype
    params = per_layer(lm.params, lm.config.model.n_layer)
    check_names(params, lm.gpt)
    params = map_matrices(lambda w: w.astype(dtype), params, lm.gpt)
    return lm._replace(params=block_on_mesh(lm, params))
