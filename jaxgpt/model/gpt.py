"""The decoder: ids -> embeddings -> blocks -> logits.

Letters in names: B batch, T query positions, S key/value positions, D model width, N heads, K key/value heads, H head
width, F MLP width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig, UserError
from jaxgpt.model.attention import Attention, BlockInputs
from jaxgpt.model.cache import KVCache
from jaxgpt.model.embedding import Embedding
from jaxgpt.model.linear import Linear
from jaxgpt.model.mlp import MLP
from jaxgpt.model.named import Named
from jaxgpt.model.norm import Norm
from jaxgpt.model.scan import REMAT, STACKED, Remat
from jaxgpt.ops.attention import AttentionKernel, SegmentIds, causal_mask, segment_positions
from jaxgpt.ops.dropout import dropout
from jaxgpt.ops.random import subkey
from jaxgpt.ops.rotary import Llama3Scaling, Rotation, rope_frequencies, rope_rotation
from jaxgpt.ops.sharding import constrain
from jaxgpt.ops.sinusoidal import sinusoidal


class Block(Named):
    """Compute `y = x + attn(norm(x))`, then `y + mlp(norm(y))`; with `parallel_residual`, `y + mlp(norm(x))`.

    `norm_position` puts a norm around each sublayer f: `x + f(norm(x))` (pre), `x + norm(f(x))` (output),
    `x + norm(f(norm(x)))` (both), `norm(x + f(x))` (post).
    """

    config: ModelConfig
    dtype: jnp.dtype
    kernel: AttentionKernel | None = None
    window: int = 0

    @nn.compact
    def __call__(self, x_BTD: jax.Array, inputs: BlockInputs) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Return the residual stream `[B, T, D]`, and with a cache the layer's updated keys and values."""
        c, key = self.config, inputs.key
        x_BTD = self.named("resid.pre", x_BTD)
        attention = Attention(c, self.dtype, self.kernel, self.window, name="attn")
        out_BTD, updated = attention(self._input(x_BTD, "ln_1"), inputs, subkey(key, 0))
        y_BTD = self._add(x_BTD, self.named("attn.out", out_BTD), "ln_1", subkey(key, 1))
        y_BTD = self.named("resid.mid", y_BTD)
        if c.mlp != "none":
            out_BTD = MLP(c, self.dtype, name="mlp")(self._input(x_BTD if c.parallel_residual else y_BTD, "ln_2"))
            y_BTD = self._add(y_BTD, self.named("mlp.out", out_BTD), "ln_2", subkey(key, 2))
        return self.named("resid.post", constrain(y_BTD, ("batch", "length", "width"))), updated

    def _input(self, x_BTD: jax.Array, name: str) -> jax.Array:
        return self._norm(x_BTD, name) if self.config.norm_position in ("pre", "both") else x_BTD

    def _add(self, x_BTD: jax.Array, out_BTD: jax.Array, name: str, key: jax.Array | None) -> jax.Array:
        """Add the output of a sublayer to the residual stream."""
        position = self.config.norm_position
        out_BTD = self._norm(out_BTD, f"{name}_out") if position in ("output", "both") else out_BTD
        x_BTD = x_BTD + dropout(out_BTD, self.config.dropout, key)
        return self._norm(x_BTD, name) if position == "post" else x_BTD

    def _norm(self, x_BTD: jax.Array, name: str) -> jax.Array:
        return Norm(self.config, self.dtype, name=name)(x_BTD)


class GPT(Named):
    """A decoder-only transformer.

    `GPT(config).apply({"params": params}, tokens_BT)` returns `logits_BTV`; `method="extend"` continues from a cache. Weights
    of `stack_layers` run as a scan over one block, which supports no cache. `jaxgpt.study` reads and edits the activations that
    modules name with `self.named`.

    Attributes:
        config: the architecture, with `vocab_size` set.
        dtype: of the matrix products, that of the logits included; parameters, norms and softmax are float32. Logits are
            returned as float32.
        remat: what the backward pass recomputes: nothing (`none`), all but the products with weights (`dots`; `offload` keeps
            these in host memory), or everything (`full`).
        kernel: computes attention among the given tokens, without a cache or with an empty one; None: `attend`.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.float32
    remat: Remat = "none"
    kernel: AttentionKernel | None = None

    def setup(self) -> None:
        c = self.config
        if not c.vocab_size:
            raise UserError("model.vocab_size is 0: set it to the size of the tokenizer's vocabulary")
        self.wte = Embedding(c, c.vocab_size, ("vocab", "embed"), self.dtype)
        if c.positions == "learned":
            self.wpe = Embedding(c, c.block_size, ("position", "embed"), self.dtype)
        block = Block if self.remat == "none" else nn.remat(Block, policy=REMAT[self.remat])
        self.h = [block(c, self.dtype, self.kernel, window) for window in c.windows]
        if c.final_norm:
            self.ln_f = Norm(c, self.dtype)
        if not c.tie_embeddings:
            self.lm_head = Linear(c, (c.n_embd, c.vocab_size), ("embed", "vocab"), c.head_bias, self.dtype)

    def __call__(
        self, tokens_BT: jax.Array, key: jax.Array | None = None, segment_ids_BT: SegmentIds = None
    ) -> jax.Array:
        """Compute the logits of the next token at each position, float32 `[B, T, V]`.

        Args:
            tokens_BT: ids below `vocab_size`.
            key: key of the dropout masks; None disables dropout.
            segment_ids_BT: the document of each token, if rows hold several: the logits of a document are those it has alone.
                The tokens of a document are consecutive and have the same id.

        Raises:
            ValueError: more tokens than the table of learned positions has.
        """
        return self.head(self.hidden(tokens_BT, key, segment_ids_BT))

    def hidden(
        self, tokens_BT: jax.Array, key: jax.Array | None = None, segment_ids_BT: SegmentIds = None
    ) -> jax.Array:
        """Compute the final hidden states `[B, T, D]`, the input of `head`. Arguments as for `__call__`."""
        chex.assert_rank(tokens_BT, 2)
        return self.stack(self.embed(tokens_BT), key=key, segment_ids_BT=segment_ids_BT)[0]

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
        x_BTD = constrain(self.wte(tokens_BT), ("lookup", "length", "embed"))
        x_BTD = x_BTD * jnp.asarray(math.sqrt(self.config.n_embd), self.dtype) if self.config.embed_scale else x_BTD
        return self.named("embed", x_BTD)

    def stack(
        self,
        x_BTD: jax.Array,
        cache: KVCache | None = None,
        key: jax.Array | None = None,
        segment_ids_BT: SegmentIds = None,
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
            slot_T, slot_S, start_B = cache.length + jnp.arange(T), jnp.arange(cache.size), cache.start_B
        empty = cache is not None and isinstance(cache.length, int) and cache.length == 0
        masked_by_kernel = self.kernel is not None and (cache is None or empty)
        positions_BT = jnp.maximum(slot_T[None, :] - start_B[:, None], 0)
        if segment_ids_BT is not None:
            assert cache is None, "a cache holds one document per row"
            chex.assert_shape(segment_ids_BT, x_BTD.shape[:2])
            positions_BT = segment_positions(segment_ids_BT)
        elif masked_by_kernel and empty:
            segment_ids_BT = (slot_T[None, :] >= start_B[:, None]).astype(jnp.int32)  # padding is a document of its own

        if c.positions == "learned":
            x_BTD = x_BTD + self.named("pos_embed", self.wpe(positions_BT))
        elif c.positions == "sinusoidal":
            x_BTD = x_BTD + self.named("pos_embed", sinusoidal(positions_BT, c.n_embd).astype(x_BTD.dtype))
        inputs: dict[int, BlockInputs] = {}  # layers with the same window share the mask and the rotation
        for window in sorted(set(c.windows)):
            mask_BNTS = None if masked_by_kernel else causal_mask(slot_T, slot_S, start_B, window, segment_ids_BT)
            inputs[window] = BlockInputs(mask_BNTS, _rotation(c, positions_BT, window), segment_ids_BT=segment_ids_BT)
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
        if cache is None:
            return x_BTD, None
        k, v = zip(*updated, strict=True)
        return x_BTD, KVCache(k, v, cache.start_B, jnp.asarray(cache.length + T, jnp.int32))

    def _unrolled(
        self, x_BTD: jax.Array, inputs: dict[int, BlockInputs], cache: KVCache | None, key: jax.Array | None
    ) -> tuple[jax.Array, list[Any]]:
        updated = []
        for layer, block in enumerate(self.h):
            layer_cache = None if cache is None else (cache.k[layer], cache.v[layer], cache.length)
            layer_inputs = inputs[block.window]._replace(cache=layer_cache, layer=layer, key=subkey(key, layer + 1))
            x_BTD, kv = block(x_BTD, layer_inputs)
            updated.append(kv)
        return x_BTD, updated

    def _scanned(
        self, stacked: Any, x_BTD: jax.Array, inputs: dict[int, BlockInputs], key: jax.Array | None
    ) -> jax.Array:
        [(window, every)] = inputs.items()  # all layers have the same window
        block = Block(self.config, self.dtype, self.kernel, window, parent=None)

        def run(x_BTD: jax.Array, layer_and_params: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
            layer, params = layer_and_params
            layer_inputs = every._replace(layer=layer, key=subkey(key, layer + 1))
            return block.apply({"params": params}, x_BTD, layer_inputs)[0], None

        if self.remat != "none":
            run = jax.checkpoint(run, policy=REMAT[self.remat], prevent_cse=False)
        return jax.lax.scan(run, x_BTD, (jnp.arange(self.config.n_layer), stacked))[0]

    def head(self, x_BTD: jax.Array) -> jax.Array:
        """Compute logits from hidden states, float32 `[B, T, V]`; a tied head multiplies by the token table."""
        logits_BTV = self.wte.attend(x_BTD) if self.config.tie_embeddings else self.lm_head(x_BTD)
        logits_BTV = constrain(logits_BTV, ("batch", "length", "vocab")).astype(jnp.float32)
        cap = self.config.logit_softcap
        return self.named("logits", cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV)


def _rotation(config: ModelConfig, positions_BT: jax.Array, window: int) -> Rotation | None:
    if config.positions != "rope":
        return None
    theta, scaling = config.rope_local_theta, Llama3Scaling()
    if not (window and theta):
        theta, scaling = config.rope_theta, _scaling(config)
    return rope_rotation(positions_BT, rope_frequencies(config.rotary_width, theta, scaling))


def _scaling(config: ModelConfig) -> Llama3Scaling:
    return Llama3Scaling(
        config.rope_factor,
        config.rope_low_freq_factor,
        config.rope_high_freq_factor,
        config.rope_original_context,
    )
