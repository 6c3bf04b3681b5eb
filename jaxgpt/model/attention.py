"""Multi-head causal self-attention: the projections around `ops.attention`."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.cache import write
from jaxgpt.model.linear import Linear
from jaxgpt.model.named import Named
from jaxgpt.model.norm import Norm
from jaxgpt.ops.attention import AttentionKernel, SegmentIds, attend
from jaxgpt.ops.dropout import dropout
from jaxgpt.ops.rotary import Rotation, rotate
from jaxgpt.ops.sharding import constrain


class BlockInputs(NamedTuple):
    """Inputs of a block besides the residual stream.

    Attributes:
        mask_BNTS: true where attention is allowed; None if the attention kernel computes its own mask.
        rotation: cosine and sine of each position's angles; None without RoPE.
        cache: keys `[B, K, S, H]` and values `[B, K, H, S]` of the layer, and the slot to write to; None without a cache.
        layer: index of the layer, from 0.
        key: key of the layer's dropout masks; None disables dropout.
        segment_ids_BT: the document of each position, for an attention kernel; None: one document per row.
    """

    mask_BNTS: jax.Array | None
    rotation: Rotation | None
    cache: tuple[jax.Array, jax.Array, jax.Array | int] | None = None
    layer: int | jax.Array = 0
    key: jax.Array | None = None
    segment_ids_BT: SegmentIds = None


class Attention(Named):
    """Multi-head causal self-attention with grouped keys and values, and an explicit cache.

    Attributes:
        kernel: computes attention where there is no mask; None: `attend`.
        window: the layer's sliding window, which a kernel applies; 0: none.
    """

    config: ModelConfig
    dtype: jnp.dtype
    kernel: AttentionKernel | None = None
    window: int = 0

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, inputs: BlockInputs, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Return the output `[B, T, D]`, and with a cache the layer's updated keys and values."""
        c = self.config
        q_BTNH = self._project(x_BTD, "q", "heads", c.n_head)
        k_BTKH = self._project(x_BTD, "k", "kv_heads", c.kv_heads)
        v_BTKH = self._project(x_BTD, "v", "kv_heads", c.kv_heads)
        if c.qk_norm:
            q_BTNH, k_BTKH = self._normed(q_BTNH, "q_norm"), self._normed(k_BTKH, "k_norm")
        if inputs.rotation is not None:
            q_BTNH = self.named("rot_q", rotate(q_BTNH, inputs.rotation))
            k_BTKH = self.named("rot_k", rotate(k_BTKH, inputs.rotation))
        if c.scale_attn_by_inverse_layer_idx:
            q_BTNH = q_BTNH / jnp.asarray(inputs.layer + 1, self.dtype)
        scale = 1 / math.sqrt(c.head_width) if c.scale_attn_weights else 1.0

        k_BSKH, v_BSKH, updated = k_BTKH, v_BTKH, None
        if inputs.cache is not None:
            cached_k, cached_v, slot = inputs.cache
            updated = k_BKSH, v_BKHS = write(cached_k, cached_v, k_BTKH, v_BTKH, slot)
            k_BSKH, v_BSKH = k_BKSH.transpose(0, 2, 1, 3), v_BKHS.transpose(0, 3, 1, 2)
        if inputs.mask_BNTS is None:
            assert self.kernel is not None
            out_BTNH = self.kernel(q_BTNH, k_BTKH, v_BTKH, scale, self.window, inputs.segment_ids_BT)
        else:
            drop = functools.partial(dropout, rate=c.dropout, key=key)
            k_BSKH, v_BSKH = k_BSKH.astype(self.dtype), v_BSKH.astype(self.dtype)
            out_BTNH, _ = attend(q_BTNH, k_BSKH, v_BSKH, inputs.mask_BNTS, scale, drop, self.named)
        out_BTNH = self.named("head_out", out_BTNH)
        if not c.attn_proj:
            return out_BTNH.reshape(x_BTD.shape), updated
        shape, axes = (c.n_head, c.head_width, c.n_embd), ("heads", "head_dim", "embed")
        o_proj = Linear(c, shape, axes, c.bias, self.dtype, residual=True, n_in=2, name="o_proj")
        return o_proj(out_BTNH), updated

    def _normed(self, x_BTNH: jax.Array, name: str) -> jax.Array:
        norm = Norm(self.config, self.dtype, "rmsnorm", name=name)
        if self.config.qk_norm_per_head:
            return norm(x_BTNH)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)

    def _project(self, x_BTD: jax.Array, name: str, axis: str, heads: int) -> jax.Array:
        c = self.config
        shape, axes = (c.n_embd, heads, c.head_width), ("embed", axis, "head_dim")
        y = Linear(c, shape, axes, c.bias or c.qkv_bias, self.dtype, name=f"{name}_proj")(x_BTD)
        return self.named(name, constrain(y, ("batch", "length", axis, "head_dim")))
