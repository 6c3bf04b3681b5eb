"""The decoder, top to bottom: ids -> vectors -> blocks -> logits.

Letters in names: B batch, T query positions, S key/value positions, D model width, N heads, K key/value heads, H head
width, F MLP width, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import Any, Literal

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.attention import Attention, causal_mask
from jaxgpt.model.cache import KVCache
from jaxgpt.model.dropout import dropout, part_of
from jaxgpt.model.flash import Flash
from jaxgpt.model.layers import STACKED
from jaxgpt.model.linear import Embedding, Linear, constrain
from jaxgpt.model.mlp import MLP
from jaxgpt.model.norms import Norm
from jaxgpt.model.positions import Rotation, rope_rotation, sinusoidal

_policies = jax.checkpoint_policies
_kernels = _policies.save_only_these_names("attention")  # a flash kernel is no product, and goes by its name
_offload_products = _policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def _offload(primitive: Any, *avals: Any, **params: Any) -> Any:
    return _kernels(primitive, *avals, **params) or _offload_products(primitive, *avals, **params)


# What of a block the forward pass keeps for the backward pass, which computes the rest again.
REMAT = {
    "dots": _policies.save_from_both_policies(_kernels, _policies.dots_with_no_batch_dims_saveable),
    "offload": _offload,  # products as well, in the host's memory
    "full": _policies.nothing_saveable,
}

Remat = Literal["none", "dots", "offload", "full"]
LayerCache = tuple[jax.Array, jax.Array, jax.Array]


class Block(nn.Module):
    """`x + attn(norm(x))`, then `x + mlp(norm(x))`; post-norm: `norm(x + attn(x))`, then `norm(x + mlp(x))`."""

    config: ModelConfig
    dtype: jnp.dtype
    flash: Flash | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BNTS: jax.Array | None,
        rotation: Rotation | None,
        cache: LayerCache | None,
        layer: int | jax.Array,
        key: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        c = self.config
        pre = c.norm_position == "pre"

        norm = Norm(c, self.dtype, name="ln_1")
        attention = Attention(c, self.dtype, self.flash, name="attn")
        y_BTD, written = attention(norm(x_BTD) if pre else x_BTD, mask_BNTS, rotation, cache, layer, part_of(key, 0))
        x_BTD = x_BTD + dropout(y_BTD, c.dropout, part_of(key, 1))
        x_BTD = x_BTD if pre else norm(x_BTD)

        if c.mlp != "none":
            norm = Norm(c, self.dtype, name="ln_2")
            y_BTD = MLP(c, self.dtype, name="mlp")(norm(x_BTD) if pre else x_BTD)
            x_BTD = x_BTD + dropout(y_BTD, c.dropout, part_of(key, 2))
            x_BTD = x_BTD if pre else norm(x_BTD)
        return constrain(x_BTD, ("batch", "length", "width")), written


class GPT(nn.Module):
    """A decoder-only transformer.

    `GPT(config).apply({"params": params}, tokens_BT)` gives `logits_BTV`; `method="extend"` does the same for the next
    tokens of a cache. With `mutable="intermediates"`, hidden states and attention weights come out as well. Weights that
    `stack_layers` has stacked are run by a scan over one block: the same function, without a cache and intermediates.

    Attributes:
        config: what is computed. `vocab_size` must be known by now.
        dtype: of the matrix products; parameters, norms, softmax and logits are float32.
        remat: what the backward pass recomputes: nothing, all but products with weights (`dots`; `offload` keeps those in
            the host's memory), or all.
        flash: the kernel of attention without a cache; None: `attend`.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.float32
    remat: Remat = "none"
    flash: Flash | None = None

    def setup(self) -> None:
        c = self.config
        self.wte = Embedding(c, c.vocab_size, ("vocab", "embed"), self.dtype)
        if c.positions == "learned":
            self.wpe = Embedding(c, c.block_size, ("position", "embed"), self.dtype)
        block = Block if self.remat == "none" else nn.remat(Block, policy=REMAT[self.remat])
        self.h = [block(c, self.dtype, self.flash) for _ in range(c.n_layer)]
        if c.final_norm:
            self.ln_f = Norm(c, self.dtype)
        if not c.tie_embeddings:
            self.lm_head = Linear(c, (c.n_embd, c.vocab_size), ("embed", "vocab"), c.head_bias, self.dtype)

    def __call__(self, tokens_BT: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits of the token that follows each one, float32 `[B, T, V]`.

        Args:
            tokens_BT: ids.
            key: of the dropout masks; None: no dropout.

        Raises:
            ValueError: more tokens than the context holds.
        """
        return self.head(self.hidden(tokens_BT, key))

    def hidden(self, tokens_BT: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """What `head` makes the logits from, `[B, T, D]`; arguments as of a call."""
        chex.assert_rank(tokens_BT, 2)
        return self.stack(self.embed(tokens_BT), key=key)[0]

    def extend(self, tokens_BT: jax.Array, cache: KVCache, last: bool = False) -> tuple[jax.Array, KVCache]:
        """Logits of T more tokens after those in the cache, and the cache with them in it.

        Args:
            tokens_BT: where a row begins within these tokens (`cache.start_B`), what stands before is ignored.
            cache: with room for T more.
            last: only the last token's logits, `[B, 1, V]`.
        """
        x_BTD, extended = self.stack(self.embed(tokens_BT), cache)
        assert extended is not None
        return self.head(x_BTD[:, -1:] if last else x_BTD), extended

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Ids to vectors, `[B, T, D]`.

        A device looks up its own columns of the table for all who have the others: ids and vectors travel, which are small
        beside the table and its gradient.
        """
        tokens_BT = constrain(tokens_BT, ("lookup", "length"))
        return constrain(self.wte(tokens_BT), ("lookup", "length", "embed"))

    def stack(
        self, x_BTD: jax.Array, cache: KVCache | None = None, key: jax.Array | None = None
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
        whole = self.flash is not None and cache is None  # the kernel has its own mask
        mask_BNTS = None if whole else causal_mask(slot_T, slot_S, start_B, c.sliding_window)
        positions_BT = jnp.maximum(slot_T[None, :] - start_B[:, None], 0)

        if c.positions == "learned":
            x_BTD = x_BTD + self.wpe(positions_BT)
        elif c.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoidal(positions_BT, c.n_embd).astype(x_BTD.dtype)
        rotation = rope_rotation(positions_BT, c) if c.positions == "rope" else None
        x_BTD = dropout(x_BTD, c.dropout, part_of(key, 0))
        x_BTD = constrain(x_BTD, ("batch", "length", "width"))

        stacked: Any = self.get_variable("params", STACKED)
        if stacked is None:
            x_BTD, written = self._unrolled(x_BTD, mask_BNTS, rotation, cache, key)
        else:
            assert cache is None, "decoding takes weights per layer"
            x_BTD = self._scanned(stacked, x_BTD, mask_BNTS, rotation, key)
        if c.final_norm:
            x_BTD = self.ln_f(x_BTD)
        self.sow("intermediates", "hidden", x_BTD)
        if cache is None:
            return x_BTD, None
        k, v = zip(*written, strict=True)
        return x_BTD, KVCache(k, v, cache.start_B, cache.length + T)

    def _unrolled(
        self,
        x_BTD: jax.Array,
        mask_BNTS: jax.Array | None,
        rotation: Rotation | None,
        cache: KVCache | None,
        key: jax.Array | None,
    ) -> tuple[jax.Array, list[Any]]:
        written = []
        for layer, block in enumerate(self.h):
            self.sow("intermediates", "hidden", x_BTD)
            layer_cache = None if cache is None else (cache.k[layer], cache.v[layer], cache.length)
            x_BTD, kv = block(x_BTD, mask_BNTS, rotation, layer_cache, layer, part_of(key, layer + 1))
            written.append(kv)
        return x_BTD, written

    def _scanned(
        self,
        stacked: Any,
        x_BTD: jax.Array,
        mask_BNTS: jax.Array | None,
        rotation: Rotation | None,
        key: jax.Array | None,
    ) -> jax.Array:
        block = Block(self.config, self.dtype, self.flash, parent=None)

        def run(x_BTD: jax.Array, of_layer: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
            layer, params = of_layer
            variables = {"params": params}
            return block.apply(variables, x_BTD, mask_BNTS, rotation, None, layer, part_of(key, layer + 1))[0], None

        if self.remat != "none":
            run = jax.checkpoint(run, policy=REMAT[self.remat], prevent_cse=False)
        return jax.lax.scan(run, x_BTD, (jnp.arange(self.config.n_layer), stacked))[0]

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
