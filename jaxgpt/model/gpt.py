"""The decoder: ids -> embeddings -> blocks -> logits.

Letters in names: B batch, T query positions, S key/value positions, D model width, N heads, K key/value heads, H head
width, F MLP width, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.attention import Attention, BlockInputs
from jaxgpt.model.cache import KVCache
from jaxgpt.model.embedding import Embedding
from jaxgpt.model.linear import Linear
from jaxgpt.model.mlp import MLP
from jaxgpt.model.norm import Norm
from jaxgpt.model.scan import REMAT, STACKED, Remat
from jaxgpt.ops.attention import AttentionKernel, causal_mask
from jaxgpt.ops.dropout import dropout
from jaxgpt.ops.random import subkey
from jaxgpt.ops.rotary import Llama3Scaling, Rotation, rope_frequencies, rope_rotation
from jaxgpt.ops.sharding import constrain
from jaxgpt.ops.sinusoidal import sinusoidal


class Block(nn.Module):
    """Compute `x + attn(norm(x))`, then `x + mlp(norm(x))`; post-norm: `norm(x + attn(x))`, then `norm(x + mlp(x))`."""

    config: ModelConfig
    dtype: jnp.dtype
    kernel: AttentionKernel | None = None

    @nn.compact
    def __call__(self, x_BTD: jax.Array, inputs: BlockInputs) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Return the residual stream `[B, T, D]`, and with a cache the layer's updated keys and values."""
        c, key = self.config, inputs.key
        pre = c.norm_position == "pre"

        norm = Norm(c, self.dtype, name="ln_1")
        attention = Attention(c, self.dtype, self.kernel, name="attn")
        y_BTD, updated = attention(norm(x_BTD) if pre else x_BTD, inputs, subkey(key, 0))
        x_BTD = x_BTD + dropout(y_BTD, c.dropout, subkey(key, 1))
        x_BTD = x_BTD if pre else norm(x_BTD)

        if c.mlp != "none":
            norm = Norm(c, self.dtype, name="ln_2")
            y_BTD = MLP(c, self.dtype, name="mlp")(norm(x_BTD) if pre else x_BTD)
            x_BTD = x_BTD + dropout(y_BTD, c.dropout, subkey(key, 2))
            x_BTD = x_BTD if pre else norm(x_BTD)
        return constrain(x_BTD, ("batch", "length", "width")), updated


class GPT(nn.Module):
    """A decoder-only transformer.

    `GPT(config).apply({"params": params}, tokens_BT)` returns `logits_BTV`; `method="extend"` continues from a cache. With
    `mutable="intermediates"`, hidden states and attention weights are returned as well. Parameters from `stack_layers` run as a
    scan over one block, which supports neither a cache nor intermediates.

    Attributes:
        config: the architecture, with `vocab_size` set.
        dtype: of the matrix products; parameters, norms, softmax and logits are float32.
        remat: what the backward pass recomputes: nothing (`none`), all but the products with weights (`dots`; `offload` keeps
            these in host memory), or everything (`full`).
        kernel: computes attention without a cache; None: `attend`.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.float32
    remat: Remat = "none"
    kernel: AttentionKernel | None = None

    def setup(self) -> None:
        c = self.config
        self.wte = Embedding(c, c.vocab_size, ("vocab", "embed"), self.dtype)
        if c.positions == "learned":
            self.wpe = Embedding(c, c.block_size, ("position", "embed"), self.dtype)
        block = Block if self.remat == "none" else nn.remat(Block, policy=REMAT[self.remat])
        self.h = [block(c, self.dtype, self.kernel) for _ in range(c.n_layer)]
        if c.final_norm:
            self.ln_f = Norm(c, self.dtype)
        if not c.tie_embeddings:
            self.lm_head = Linear(c, (c.n_embd, c.vocab_size), ("embed", "vocab"), c.head_bias, self.dtype)

    def __call__(self, tokens_BT: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Compute the logits of the next token at each position, float32 `[B, T, V]`.

        Args:
            tokens_BT: ids below `vocab_size`.
            key: key of the dropout masks; None disables dropout.

        Raises:
            ValueError: more tokens than the table of learned positions has.
        """
        return self.head(self.hidden(tokens_BT, key))

    def hidden(self, tokens_BT: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Compute the final hidden states `[B, T, D]`, the input of `head`. Arguments as for `__call__`."""
        chex.assert_rank(tokens_BT, 2)
        return self.stack(self.embed(tokens_BT), key=key)[0]

    def extend(self, tokens_BT: jax.Array, cache: KVCache, last: bool = False) -> tuple[jax.Array, KVCache]:
        """Compute the logits of T tokens that follow those in the cache.

        Args:
            tokens_BT: ids; those before a row's start (`cache.start_B`) are padding.
            cache: a cache with T free slots.
            last: return the logits of the last position only, `[B, 1, V]`.

        Returns:
            The logits and the extended cache.
        """
        x_BTD, extended = self.stack(self.embed(tokens_BT), cache)
        assert extended is not None
        return self.head(x_BTD[:, -1:] if last else x_BTD), extended

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Look up the embeddings of tokens, `[B, T, D]`.

        If the table's columns are sharded, each device looks up its columns for the tokens of all of them: exchanging ids and
        vectors is cheaper than gathering the table and its gradient.
        """
        tokens_BT = constrain(tokens_BT, ("lookup", "length"))
        return constrain(self.wte(tokens_BT), ("lookup", "length", "embed"))

    def stack(
        self, x_BTD: jax.Array, cache: KVCache | None = None, key: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache | None]:
        """Apply position encoding, blocks and final norm: `[B, T, D]` to `[B, T, D]`."""
        c = self.config
        T = x_BTD.shape[1]
        if cache is None:
            if c.positions == "learned" and c.block_size < T:  # a lookup out of range would return NaN
                raise ValueError(f"{T} tokens do not fit the context of {c.block_size} (model.block_size)")
            slot_T = slot_S = jnp.arange(T)
            start_B = jnp.zeros((1,), jnp.int32)
        else:
            slot_T, slot_S, start_B = cache.length + jnp.arange(T), jnp.arange(cache.k[0].shape[1]), cache.start_B
        masked_by_kernel = self.kernel is not None and cache is None
        mask_BNTS = None if masked_by_kernel else causal_mask(slot_T, slot_S, start_B, c.sliding_window)
        positions_BT = jnp.maximum(slot_T[None, :] - start_B[:, None], 0)

        if c.positions == "learned":
            x_BTD = x_BTD + self.wpe(positions_BT)
        elif c.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoidal(positions_BT, c.n_embd).astype(x_BTD.dtype)
        inputs = BlockInputs(mask_BNTS, _rotation(c, positions_BT))
        x_BTD = dropout(x_BTD, c.dropout, subkey(key, 0))
        x_BTD = constrain(x_BTD, ("batch", "length", "width"))

        stacked: Any = self.get_variable("params", STACKED)
        if stacked is None:
            x_BTD, updated = self._unrolled(x_BTD, inputs, cache, key)
        else:
            assert cache is None, "a cache needs unstacked parameters"
            x_BTD = self._scanned(stacked, x_BTD, inputs, key)
        if c.final_norm:
            x_BTD = self.ln_f(x_BTD)
        self.sow("intermediates", "hidden", x_BTD)
        if cache is None:
            return x_BTD, None
        k, v = zip(*updated, strict=True)
        return x_BTD, KVCache(k, v, cache.start_B, cache.length + T)

    def _unrolled(
        self, x_BTD: jax.Array, inputs: BlockInputs, cache: KVCache | None, key: jax.Array | None
    ) -> tuple[jax.Array, list[Any]]:
        updated = []
        for layer, block in enumerate(self.h):
            self.sow("intermediates", "hidden", x_BTD)
            layer_cache = None if cache is None else (cache.k[layer], cache.v[layer], cache.length)
            x_BTD, kv = block(x_BTD, inputs._replace(cache=layer_cache, layer=layer, key=subkey(key, layer + 1)))
            updated.append(kv)
        return x_BTD, updated

    def _scanned(self, stacked: Any, x_BTD: jax.Array, inputs: BlockInputs, key: jax.Array | None) -> jax.Array:
        block = Block(self.config, self.dtype, self.kernel, parent=None)

        def run(x_BTD: jax.Array, layer_and_params: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
            layer, params = layer_and_params
            layer_inputs = inputs._replace(layer=layer, key=subkey(key, layer + 1))
            return block.apply({"params": params}, x_BTD, layer_inputs)[0], None

        if self.remat != "none":
            run = jax.checkpoint(run, policy=REMAT[self.remat], prevent_cse=False)
        return jax.lax.scan(run, x_BTD, (jnp.arange(self.config.n_layer), stacked))[0]

    def head(self, x_BTD: jax.Array) -> jax.Array:
        """Compute logits from hidden states, float32 `[B, T, V]`; a tied head multiplies by the token table."""
        logits_BTV = self.wte.attend(x_BTD) if self.config.tie_embeddings else self.lm_head(x_BTD)
        logits_BTV = constrain(logits_BTV, ("batch", "length", "vocab")).astype(jnp.float32)
        cap = self.config.logit_softcap
        return cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV


def _rotation(config: ModelConfig, positions_BT: jax.Array) -> Rotation | None:
    if config.positions != "rope":
        return None
    scaling = Llama3Scaling(
        config.rope_factor,
        config.rope_low_freq_factor,
        config.rope_high_freq_factor,
        config.rope_original_context,
    )
    return rope_rotation(positions_BT, rope_frequencies(config.head_width, config.rope_theta, scaling))
