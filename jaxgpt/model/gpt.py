"""The decoder, top to bottom: ids -> vectors -> blocks -> logits.

Letters in names: B batch, T query positions, S key/value positions, D model width, N heads, K key/value heads, H head
width, F MLP width, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import Literal

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.attention import Attention, causal_mask
from jaxgpt.model.cache import KVCache
from jaxgpt.model.linear import Embedding, Linear, constrain
from jaxgpt.model.mlp import MLP
from jaxgpt.model.norms import Norm
from jaxgpt.model.positions import rope_angles, sinusoidal

REMAT = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep the products with weights
    "full": jax.checkpoint_policies.nothing_saveable,
}

LayerCache = tuple[jax.Array, jax.Array, jax.Array]


class Block(nn.Module):
    """`x + attn(norm(x))`, then `x + mlp(norm(x))`; post-norm: `norm(x + attn(x))`, then `norm(x + mlp(x))`."""

    config: ModelConfig
    layer: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BNTS: jax.Array,
        angle_BTh: jax.Array | None,
        cache: LayerCache | None,
        deterministic: bool,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        c = self.config
        pre = c.norm_position == "pre"
        drop = nn.Dropout(c.dropout, deterministic=deterministic)

        norm = Norm(c, self.dtype, name="ln_1")
        attention = Attention(c, self.layer, self.dtype, name="attn")
        y_BTD, written = attention(norm(x_BTD) if pre else x_BTD, mask_BNTS, angle_BTh, cache, deterministic)
        x_BTD = x_BTD + drop(y_BTD)
        x_BTD = x_BTD if pre else norm(x_BTD)

        if c.mlp != "none":
            norm = Norm(c, self.dtype, name="ln_2")
            x_BTD = x_BTD + drop(MLP(c, self.dtype, name="mlp")(norm(x_BTD) if pre else x_BTD))
            x_BTD = x_BTD if pre else norm(x_BTD)
        return constrain(x_BTD, ("batch", "length", "width")), written


class GPT(nn.Module):
    """A decoder-only transformer.

    `GPT(config).apply({"params": params}, tokens_BT)` gives `logits_BTV`; `method="extend"` does the same for the next
    tokens of a cache. With `mutable="intermediates"`, hidden states and attention weights come out as well.

    Attributes:
        config: what is computed. `vocab_size` must be known by now.
        dtype: of the matrix products; parameters, norms, softmax and logits are float32.
        remat: what the backward pass recomputes: none, dots (all but products with weights), full.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.float32
    remat: Literal["none", "dots", "full"] = "none"

    def setup(self) -> None:
        c = self.config
        self.wte = Embedding(c, c.vocab_size, ("vocab", "embed"), self.dtype)
        if c.positions == "learned":
            self.wpe = Embedding(c, c.block_size, ("position", "embed"), self.dtype)
        self.drop = nn.Dropout(c.dropout)
        block = Block if self.remat == "none" else nn.remat(Block, policy=REMAT[self.remat], static_argnums=(5,))
        self.h = [block(c, layer, self.dtype) for layer in range(c.n_layer)]
        if c.final_norm:
            self.ln_f = Norm(c, self.dtype)
        if not c.tie_embeddings:
            self.lm_head = Linear(c, (c.n_embd, c.vocab_size), ("embed", "vocab"), c.head_bias, self.dtype)

    def __call__(self, tokens_BT: jax.Array, deterministic: bool = True) -> jax.Array:
        """Logits of the token that follows each one, float32 `[B, T, V]`.

        Raises:
            ValueError: more tokens than the context holds.
        """
        chex.assert_rank(tokens_BT, 2)
        return self.head(self.stack(self.wte(tokens_BT), deterministic=deterministic)[0])

    def extend(self, tokens_BT: jax.Array, cache: KVCache, last: bool = False) -> tuple[jax.Array, KVCache]:
        """Logits of T more tokens after those in the cache, and the cache with them in it.

        Args:
            tokens_BT: where a row begins within these tokens (`cache.start_B`), what stands before is ignored.
            cache: with room for T more.
            last: only the last token's logits, `[B, 1, V]`.
        """
        x_BTD, extended = self.stack(self.wte(tokens_BT), cache)
        assert extended is not None
        return self.head(x_BTD[:, -1:] if last else x_BTD), extended

    def stack(
        self, x_BTD: jax.Array, cache: KVCache | None = None, deterministic: bool = True
    ) -> tuple[jax.Array, KVCache | None]:
        """Positions, blocks and final norm: `[B, T, D]` to `[B, T, D]`, without embedding and head."""
        c = self.config
        T = x_BTD.shape[1]
        if cache is None:
            _check_context(c, T)
            slot_T = slot_S = jnp.arange(T)
            start_B = jnp.zeros((1,), jnp.int32)
        else:
            slot_T, slot_S, start_B = cache.length + jnp.arange(T), jnp.arange(cache.k[0].shape[1]), cache.start_B
        mask_BNTS = causal_mask(slot_T, slot_S, start_B, c.sliding_window)
        positions_BT = jnp.maximum(slot_T[None, :] - start_B[:, None], 0)

        if c.positions == "learned":
            x_BTD = x_BTD + self.wpe(positions_BT)
        elif c.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoidal(positions_BT, c.n_embd).astype(x_BTD.dtype)
        angle_BTh = rope_angles(positions_BT, c) if c.positions == "rope" else None
        x_BTD = self.drop(x_BTD, deterministic=deterministic)
        x_BTD = constrain(x_BTD, ("batch", "length", "width"))

        written = []
        for layer, block in enumerate(self.h):
            self.sow("intermediates", "hidden", x_BTD)
            layer_cache = None if cache is None else (cache.k[layer], cache.v[layer], cache.length)
            x_BTD, kv = block(x_BTD, mask_BNTS, angle_BTh, layer_cache, deterministic)
            written.append(kv)
        if c.final_norm:
            x_BTD = self.ln_f(x_BTD)
        self.sow("intermediates", "hidden", x_BTD)
        if cache is None:
            return x_BTD, None
        k, v = zip(*written, strict=True)
        return x_BTD, KVCache(k, v, cache.start_B, cache.length + T)

    def head(self, x_BTD: jax.Array) -> jax.Array:
        """Hidden states to float32 logits, by the token embedding itself where they are tied."""
        logits_BTV = self.wte.attend(x_BTD) if self.config.tie_embeddings else self.lm_head(x_BTD)
        logits_BTV = constrain(logits_BTV, ("batch", "length", "vocab")).astype(jnp.float32)
        cap = self.config.logit_softcap
        return cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV


def _check_context(config: ModelConfig, T: int) -> None:
    """Only learned positions end: a lookup past the table would not fail but give NaN."""
    if config.positions == "learned" and config.block_size < T:
        raise ValueError(f"{T} tokens do not fit the context of {config.block_size} (model.block_size)")
