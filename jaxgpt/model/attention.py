"""Multi-head causal self-attention: the projections around `ops.attention`."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.model.cache import KeysValues, LayerCache
from jaxgpt.model.linear import Linear
from jaxgpt.model.module import Module
from jaxgpt.model.norm import Norm
from jaxgpt.ops.attention import Edit, Visible
from jaxgpt.ops.dropout import dropout
from jaxgpt.ops.rotary import Rotation, rotate
from jaxgpt.ops.sharding import constrain


class Attention(Module):
    """Multi-head causal self-attention, optionally with grouped queries (GQA), and an explicit cache."""

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        visible: Visible,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
        layer: int | jax.Array = 0,
        key: jax.Array | None = None,
        tokens_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, KeysValues]:
        """Apply attention; return `[B, T, D]`, and the cached and new keys and values.

        Args:
            x_BTD: inputs.
            visible: the keys that each token attends to.
            rotation: cosine and sine of each position's angles; None without RoPE.
            cache: the layer's cached keys and values, and the slot of the first token; None without a cache.
            layer: index of the layer, from 0.
            key: random key of the dropout of attention weights; None disables dropout.
            tokens_BT: ids of the tokens, for subclasses that read them; None: unknown.
        """
        c = self.config
        B, T, _ = x_BTD.shape
        q_BTNH = self._project(x_BTD, "q", "heads", c.n_head)
        k_BTKH = self._project(x_BTD, "k", "kv_heads", c.kv_heads)
        v_BTKH = self.values(x_BTD, tokens_BT)
        if c.qk_norm:
            q_BTNH = self._normed(q_BTNH, "q_norm")
            k_BTKH = self._normed(k_BTKH, "k_norm")
        if rotation is not None:
            q_BTNH = self.named("rot_q", rotate(q_BTNH, rotation))
            k_BTKH = self.named("rot_k", rotate(k_BTKH, rotation))
        if c.scale_attn_by_inverse_layer_idx:
            q_BTNH = q_BTNH / jnp.asarray(layer + 1, self.ops.dtype)
        scale = 1 / math.sqrt(c.head_width) if c.scale_attn_weights else 1.0

        kv = KeysValues(k_BTKH.transpose(0, 2, 1, 3), v_BTKH.transpose(0, 2, 3, 1))
        if cache is not None:
            kv = cache.kv.write(cache.slot, kv)
        out_BTNH = self.ops.attend(q_BTNH, *kv, visible, scale, self._edit(key))
        out = self.named("head_out", out_BTNH).reshape(B, T, -1)
        if c.attn_proj:
            shape = (c.n_head * c.head_width, c.n_embd)
            o_proj = Linear(c, self.ops, shape, ("heads", "embed"), c.bias, residual=True, name="o_proj")
            out = o_proj(out)
        return out, kv

    def values(self, x_BTD: jax.Array, tokens_BT: jax.Array | None) -> jax.Array:
        """Return the values of the tokens, `[B, T, K, H]`; a subclass may add to them."""
        return self._project(x_BTD, "v", "kv_heads", self.config.kv_heads)

    def _edit(self, key: jax.Array | None) -> Edit | None:
        """Return the edit of scores and pattern: `ops.edit`, then dropout; None without `ops.edit` and dropout.

        Kernels compute attention only if the edit is None.
        """
        rate = 0.0 if key is None else self.config.dropout
        if self.ops.edit is None and not rate:
            return None

        def edit(name: str, x: jax.Array) -> jax.Array:
            x = self.named(name, x)
            return dropout(x, rate, key) if name == "pattern" else x

        return edit

    def _normed(self, x_BTNH: jax.Array, name: str) -> jax.Array:
        norm = Norm(self.config, self.ops, "rmsnorm", name=name)
        if self.config.qk_norm_per_head:
            return norm(x_BTNH)
        B, T, *_ = x_BTNH.shape
        together = x_BTNH.reshape(B, T, -1)
        return norm(together).reshape(x_BTNH.shape)

    def _project(self, x_BTD: jax.Array, name: str, axis: str, heads: int) -> jax.Array:
        c = self.config
        B, T, _ = x_BTD.shape
        shape = (c.n_embd, heads * c.head_width)
        projection = Linear(c, self.ops, shape, ("embed", axis), c.bias or c.qkv_bias, name=f"{name}_proj")
        y_BTNH = projection(x_BTD).reshape(B, T, heads, c.head_width)
        return self.named(name, constrain(y_BTNH, ("batch", "length", axis, "head_dim")))
