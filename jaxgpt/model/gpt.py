"""The decoder: ids -> embeddings -> blocks -> logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.model.attention import Attention
from jaxgpt.model.cache import KeysValues, KVCache, LayerCache, grow
from jaxgpt.model.embedding import Embedding
from jaxgpt.model.linear import Linear
from jaxgpt.model.mlp import MLP
from jaxgpt.model.module import Module
from jaxgpt.model.moe import MoE
from jaxgpt.model.norm import Norm
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Positions, Visible, padded_positions, real_tokens, row_positions
from jaxgpt.ops.dropout import dropout
from jaxgpt.ops.random import subkey
from jaxgpt.ops.rotary import Llama3Scaling, Rotation, YarnScaling, rope_frequencies
from jaxgpt.ops.sharding import constrain
from jaxgpt.ops.sinusoidal import sinusoidal

# Side outputs of a block, by name: a value or an array for each token, `[B, T, ...]`, or for each row, `[B, 1, ...]`. The
# objective sums them over the tokens with targets (`train.side_outputs.side_sums`).
SideOutputs = Mapping[str, jax.Array]


class BlockInputs(NamedTuple):
    """The inputs of all blocks besides the residual stream.

    Attributes:
        positions: position and document of each token.
        cache: a cache with slots reserved for the tokens; None: attend only to the given tokens.
        key: random key of the dropout masks of all layers; None disables dropout.
        tokens_BT: ids of the tokens, for blocks that read them; None: unknown.
    """

    positions: Positions
    cache: KVCache | None
    key: jax.Array | None
    tokens_BT: jax.Array | None


class Block(Module):
    """Compute `y = x + attn(norm(x))`, then `y + mlp(norm(y))` (parallel: `y + mlp(norm(x))`).

    `norm_position` places the norms of each sublayer f: `x + f(norm(x))` (pre), `x + norm(f(x))` (output),
    `x + norm(f(norm(x)))` (both), `norm(x + f(x))` (post). Without an MLP, the result is y.

    A subclass may replace the classes `attention`, `mlp` and `moe`, or override `residual` and `feed_forward`.
    """

    attention = Attention
    mlp = MLP
    moe = MoE

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
    ) -> tuple[jax.Array, KeysValues, SideOutputs]:
        """Apply the block; return the new residual stream `[B, T, D]`, the layer's keys and values, and side outputs.

        Args:
            x_BTD: residual stream.
            visible: the keys that each token attends to.
            rotation: cosine and sine of each position's angles; None without RoPE.
            cache: the layer's cached keys and values, and the slot of the first token; None without a cache.
            layer: index of the layer, from 0.
            key: random key of all dropout masks of the layer; None disables dropout.
            tokens_BT: ids of the tokens, for subclasses that read them; None: unknown.
        """
        c = self.config
        pattern_key, attn_key, mlp_key = (subkey(key, i) for i in range(3))
        x_BTD = self.named("resid.pre", self.residual(x_BTD, tokens_BT))

        attention = self.attention(c, self.ops, name="attn")
        normed_BTD = self._sublayer_input(x_BTD, "ln_1")
        out_BTD, kv = attention(normed_BTD, visible, rotation, cache, layer, pattern_key, tokens_BT)
        y_BTD = self._add_output(x_BTD, self.named("attn.out", out_BTD), "ln_1", attn_key)
        y_BTD = self.named("resid.mid", y_BTD)

        sides: SideOutputs = {}
        if c.mlp != "none":
            normed_BTD = self._sublayer_input(x_BTD if c.parallel_residual else y_BTD, "ln_2")
            out_BTD, sides = self.feed_forward(normed_BTD, visible.query)
            y_BTD = self._add_output(y_BTD, self.named("mlp.out", out_BTD), "ln_2", mlp_key)
        y_BTD = constrain(y_BTD, ("residual", "length", "width"))
        return self.named("resid.post", y_BTD), kv, sides

    def residual(self, x_BTD: jax.Array, tokens_BT: jax.Array | None) -> jax.Array:
        """Return the residual stream that the block reads, `[B, T, D]`; a subclass may change it."""
        return x_BTD

    def feed_forward(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, SideOutputs]:
        """Apply the MLP or the experts, `[B, T, D]` to `[B, T, D]`; also return side outputs. A subclass may add more."""
        if self.config.n_experts:
            moe = self.moe(self.config, self.ops, name="mlp")
            return moe(x_BTD, real_tokens(positions))
        mlp = self.mlp(self.config, self.ops, name="mlp")
        return mlp(x_BTD), {}

    def _sublayer_input(self, x_BTD: jax.Array, name: str) -> jax.Array:
        """Return the input of a sublayer: the residual stream, normalized if `norm_position` is `pre` or `both`."""
        if self.config.norm_position in ("pre", "both"):
            return self._norm(x_BTD, name)
        return x_BTD

    def _add_output(self, x_BTD: jax.Array, out_BTD: jax.Array, name: str, key: jax.Array | None) -> jax.Array:
        """Add a sublayer's output to the residual stream, with dropout and the norms after the sublayer."""
        position = self.config.norm_position
        if position in ("output", "both"):
            out_BTD = self._norm(out_BTD, f"{name}_out")
        x_BTD = x_BTD + dropout(out_BTD, self.config.dropout, key)
        if position == "post":
            x_BTD = self._norm(x_BTD, name)
        return x_BTD

    def _norm(self, x_BTD: jax.Array, name: str) -> jax.Array:
        return Norm(self.config, self.ops, self.config.norm, name=name)(x_BTD)


class GPT(Module):
    """A decoder-only transformer.

    A GPT holds no weights, so call it through `apply`: `GPT(config).apply({"params": params}, tokens_BT)` returns
    `logits_BTV`, with `params` from `init_params` or a trained model. `method="prefill"` also returns a cache, which
    `method="extend"` extends.

    A subclass may replace `block`, the class of its blocks.

    Attributes:
        config: the architecture, with `vocab_size` set.
        ops: functions that compute each operation; `Ops()`: the reference definitions.
        remat: `jax.checkpoint` policy of the blocks, which selects the residuals to save; None: save all residuals.
    """

    block = Block

    ops: Ops = Ops()
    remat: Callable[..., Any] | None = None

    def setup(self) -> None:
        c = self.config
        o = self.ops
        if not c.vocab_size:
            raise UserError("model.vocab_size is 0: set it to the size of the tokenizer's vocabulary")
        self.wte = Embedding(c, o, c.vocab_size, ("vocab", "embed"))
        if c.positions == "learned":
            self.wpe = Embedding(c, o, c.block_size, ("position", "embed"))
        block = self.block if self.remat is None else nn.remat(self.block, policy=self.remat)
        self.h = [block(c, o) for _ in range(c.n_layer)]
        if c.final_norm:
            self.ln_f = Norm(c, o, c.norm)
        if not c.tie_embeddings:
            self.lm_head = Linear(c, o, (c.n_embd, c.vocab_size), ("embed", "vocab"), c.head_bias)

    def __call__(
        self, tokens_BT: jax.Array, key: jax.Array | None = None, positions: Positions | None = None
    ) -> jax.Array:
        """Compute the logits of the next token at each position, float32 `[B, T, V]`.

        Args:
            tokens_BT: token ids, from 0 to `vocab_size - 1`.
            key: random key of the dropout masks; None disables dropout.
            positions: position and document of each token, as `document_positions` returns them; None: one document per row.
                The logits of a document do not depend on the other documents of its row.

        Raises:
            ValueError: if T exceeds the table of learned positions.
            TypeError: if the model is called outside `apply` and `init`.
        """
        if self.scope is None:
            raise TypeError(
                'GPT has no weights: use model.apply({"params": params}, tokens), with params = init_params(model)'
            )
        x_BTD, _ = self.hidden_and_sides(tokens_BT, key, positions)
        return self.head(x_BTD)

    def hidden_and_sides(
        self, tokens_BT: jax.Array, key: jax.Array | None = None, positions: Positions | None = None
    ) -> tuple[jax.Array, SideOutputs]:
        """Compute the final hidden states `[B, T, D]`, the input of `head`, and the side outputs of the blocks.

        Arguments as for `__call__`.
        """
        chex.assert_rank(tokens_BT, 2)
        c = self.config
        T = tokens_BT.shape[1]
        if c.positions == "learned" and c.block_size < T:  # an error instead of NaN from an out-of-range lookup
            raise ValueError(f"{T} tokens do not fit the context of {c.block_size} (model.block_size): pass fewer")
        x_BTD = self.embed(tokens_BT)
        if positions is None:
            positions = row_positions(T)
        x_BTD, _, sides = self.stack(x_BTD, positions, key=key, tokens_BT=tokens_BT)
        return x_BTD, sides

    def prefill(self, tokens_BT: jax.Array, slots: int) -> tuple[jax.Array, KVCache]:
        """Compute the logits of prompts, float32 `[B, T, V]`, and a cache with their keys and values.

        Args:
            tokens_BT: token ids, padded on the left with negative ids.
            slots: number of slots of the cache, at least T.
        """
        T = tokens_BT.shape[1]
        positions = padded_positions(tokens_BT)
        tokens_BT = jnp.maximum(tokens_BT, 0)
        x_BTD, layers, _ = self.stack(self.embed(tokens_BT), positions, tokens_BT=tokens_BT)
        cache = grow(KVCache(layers, positions.position_BT, jnp.int32(T)), slots - T)
        return self.head(x_BTD), cache

    def extend(self, tokens_BT: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Compute the logits of T further tokens, float32 `[B, T, V]`, and the extended cache.

        Args:
            tokens_BT: ids of the tokens to append.
            cache: cache of the preceding tokens, from `prefill` or `extend`, with at least T free slots.
        """
        T = tokens_BT.shape[1]
        positions, cache = cache.reserve(T)
        x_BTD, layers, _ = self.stack(self.embed(tokens_BT), positions, cache, tokens_BT=tokens_BT)
        return self.head(x_BTD), cache._replace(layers=layers, length=cache.length + T)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Look up the embeddings of tokens, `[B, T, D]`, multiplied by `sqrt(D)` with `embed_scale`.

        If the table's columns are sharded, each device looks up its columns for the tokens of all devices along
        the mesh axis fsdp. Devices exchange ids and embeddings instead of gathering the table and its gradient.
        """
        tokens_BT = constrain(tokens_BT, ("lookup", "length"))
        x_BTD = constrain(self.wte(tokens_BT), ("lookup", "length", "embed"))
        if self.config.embed_scale:
            scale = math.sqrt(self.config.n_embd)
            x_BTD = x_BTD * jnp.asarray(scale, self.ops.dtype)
        return self.named("embed", x_BTD)

    def stack(
        self,
        x_BTD: jax.Array,
        positions: Positions,
        cache: KVCache | None = None,
        key: jax.Array | None = None,
        tokens_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KeysValues, ...], SideOutputs]:
        """Apply position encoding, blocks and final norm: `[B, T, D]`, each layer's keys and values, and side outputs.

        Args:
            x_BTD: embeddings.
            positions: positions of the tokens.
            cache: a cache with slots reserved for the tokens; None: attend only to the given tokens.
            key: random key of the dropout masks; None disables dropout.
            tokens_BT: ids of the tokens, for blocks that read them; None: unknown.
        """
        c = self.config
        position_BT = positions.position_BT
        if c.positions == "learned":
            # Padding, at position -1, reads row 0 of the table; its results are not used.
            pos_BTD = self.wpe(jnp.maximum(position_BT, 0))
            x_BTD = x_BTD + self.named("pos_embed", pos_BTD)
        elif c.positions == "sinusoidal":
            pos_BTD = sinusoidal(position_BT, c.n_embd).astype(x_BTD.dtype)
            x_BTD = x_BTD + self.named("pos_embed", pos_BTD)

        x_BTD = dropout(x_BTD, c.dropout, subkey(key, 0))
        x_BTD = constrain(x_BTD, ("residual", "length", "width"))
        x_BTD, layers, sides = self.blocks(x_BTD, BlockInputs(positions, cache, key, tokens_BT))
        if c.final_norm:
            x_BTD = self.ln_f(x_BTD)
        return x_BTD, layers, sides

    def blocks(self, x_BTD: jax.Array, inputs: BlockInputs) -> tuple[jax.Array, tuple[KeysValues, ...], SideOutputs]:
        """Apply the blocks; return `[B, T, D]`, each layer's keys and values, and the layers' side outputs (`join_layers`)."""
        cache = inputs.cache
        windows = self.config.windows
        rotations = {window: self._rotation(inputs.positions, window) for window in sorted(set(windows))}

        keys_values = []
        layer_sides = []
        for layer, (block, window) in enumerate(zip(self.h, windows, strict=True)):
            if cache is None:
                visible = Visible(inputs.positions, None, window)
                layer_cache = None
            else:
                visible = Visible(inputs.positions, Positions(cache.position_BS), window)
                layer_cache = LayerCache(cache.layers[layer], cache.length)
            x_BTD, kv, sides = block(
                x_BTD,
                visible,
                rotation=rotations[window],
                cache=layer_cache,
                layer=layer,
                key=subkey(inputs.key, layer + 1),
                tokens_BT=inputs.tokens_BT,
            )
            keys_values.append(kv)
            layer_sides.append(sides)

        joined = jax.tree.map(lambda *side_L: join_layers(jnp.stack(side_L)), *layer_sides)
        return x_BTD, tuple(keys_values), joined

    def head(self, x_BTD: jax.Array) -> jax.Array:
        """Compute logits from hidden states, in `ops.dtype`, and return them as float32 `[B, T, V]`.

        A tied head is the transposed token table.
        """
        logits_BTV = self.wte.logits(x_BTD) if self.config.tie_embeddings else self.lm_head(x_BTD)
        logits_BTV = constrain(logits_BTV, ("batch", "length", "vocab"))
        logits_BTV = logits_BTV.astype(jnp.float32)
        cap = self.config.logit_softcap
        if cap:
            logits_BTV = cap * jnp.tanh(logits_BTV / cap)
        return self.named("logits", logits_BTV)

    def _rotation(self, positions: Positions, window: int) -> Rotation | None:
        """Return the rotation of layers with this window; None without RoPE. Local layers may have a different theta."""
        c = self.config
        if c.positions != "rope":
            return None
        theta = c.rope_theta
        scaling = _rope_scaling(c)
        has_local_theta = window > 0 and c.rope_local_theta > 0
        if has_local_theta:
            theta = c.rope_local_theta
            scaling = Llama3Scaling()  # a factor of 1: no scaling

        frequencies = rope_frequencies(c.rotary_width, theta, scaling)
        rotation = self.ops.rotation(positions.position_BT, frequencies)
        if scaling.magnitude == 1.0:
            return rotation
        cos, sin = rotation
        return scaling.magnitude * cos, scaling.magnitude * sin


def join_layers(side: jax.Array) -> jax.Array:
    """Join a side output of all layers.

    Values for each token or row, `[L, B, T]`, are averaged over the layers: `[B, T]`. Arrays, `[L, B, T, ...]`, keep the axis
    of the layers: `[B, T, L, ...]`.
    """
    if side.ndim == 3:
        return side.mean(0)
    return jnp.moveaxis(side, 0, 2)


def _rope_scaling(config: ModelConfig) -> Llama3Scaling | YarnScaling:
    """Return the scaling of the RoPE frequencies, as `config.rope_scaling` specifies; a factor of 1 changes nothing."""
    if config.rope_scaling == "yarn":
        return YarnScaling(
            factor=config.rope_factor,
            slow=config.rope_beta_slow,
            fast=config.rope_beta_fast,
            original_context=config.rope_original_context,
            attention=config.rope_attention_factor,
        )
    return Llama3Scaling(
        factor=config.rope_factor,
        low=config.rope_low_freq_factor,
        high=config.rope_high_freq_factor,
        original_context=config.rope_original_context,
    )
