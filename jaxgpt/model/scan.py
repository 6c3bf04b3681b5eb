"""Stacked layers: a GPT that scans over layers, and conversion between the two layouts of weights.

Checkpoints, exports and decoding use the unstacked layout, `h_0`, `h_1`, .... The stacked layout has a single `h`, with a
leading layer axis in each leaf.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.model.cache import KeysValues
from jaxgpt.model.gpt import GPT, BlockInputs, SideOutputs, join_layers
from jaxgpt.ops.attention import Visible
from jaxgpt.ops.random import subkey

STACKED = "h"
NO_CACHE = "ScannedGPT has no cache: generate with GPT and the result of unstack_layers"
DIFFERENT_WINDOWS = "ScannedGPT needs the same sliding window in all layers; use GPT for the pattern"
LAYERS = {nn.PARTITION_NAME: "layers"}  # logical name of the layer axis in linen's boxes


class _Layer(NamedTuple):
    """The inputs of a layer in a scan, or of all layers, with a leading layer axis."""

    params: Any
    number: jax.Array  # from 0
    key: jax.Array | None  # random key of the dropout masks; None disables dropout


class ScannedGPT(GPT):
    """A GPT with stacked weights and no cache; its compile time hardly depends on the number of layers."""

    def blocks(self, x_BTD: jax.Array, inputs: BlockInputs) -> tuple[jax.Array, tuple[KeysValues, ...], SideOutputs]:
        """Apply the blocks in a scan; all layers must have the same window.

        `init` declares unstacked weights; `stack_layers` converts them to the stacked weights that this method reads.
        """
        if self.is_initializing():
            return super().blocks(x_BTD, inputs)
        if inputs.cache is not None:
            raise TypeError(NO_CACHE)
        windows = set(self.config.windows)
        if len(windows) > 1:
            raise ValueError(f"{DIFFERENT_WINDOWS}: {sorted(windows)}")
        [window] = windows
        rotation = self._rotation(inputs.positions, window)
        block = self.block(self.config, self.ops, parent=None, name=STACKED)
        visible = Visible(inputs.positions, None, window)

        def apply(x_BTD: jax.Array, layer: _Layer) -> tuple[jax.Array, SideOutputs]:
            out: Any = block.apply(
                {"params": layer.params},
                x_BTD,
                visible,
                rotation=rotation,
                layer=layer.number,
                key=layer.key,
                tokens_BT=inputs.tokens_BT,
            )
            x_BTD, _, sides = out
            return x_BTD, sides

        if self.remat is not None:
            # prevent_cse=False: a scan already keeps the recomputation apart from the forward pass.
            apply = jax.checkpoint(apply, policy=self.remat, prevent_cse=False)
        number_L = jnp.arange(self.config.n_layer)
        # As in `GPT.blocks`: key 0 is the key of the embeddings.
        key_L = jax.vmap(partial(subkey, inputs.key))(number_L + 1)
        params_L: Any = self.get_variable("params", STACKED)
        x_BTD, sides = jax.lax.scan(apply, x_BTD, _Layer(params_L, number_L, key_L))
        return x_BTD, (), jax.tree.map(join_layers, sides)

    def prefill(self, tokens_BT: jax.Array, slots: int) -> Any:
        """Raise `TypeError`: unstack the layers to generate text."""
        raise TypeError(NO_CACHE)


def layer_name(layer: int) -> str:
    """Return the name of a block's parameters."""
    return f"{STACKED}_{layer}"


def stack_layers(tree: Any) -> Any:
    """Stack the layers of every parameter tree within `tree`, which may be an optimizer state.

    `out["h"]["mlp"]... = stack([tree["h_0"]["mlp"]..., tree["h_1"]["mlp"]..., ...])`, `[L, ...]`; other entries are
    unchanged.
    """

    def stack(node: Any) -> Any:
        if not _has(node, layer_name(0)):
            return node
        n_layer = sum(_is_layer(name) for name in node)
        blocks = [node[layer_name(layer)] for layer in range(n_layer)]
        rest = {name: leaf for name, leaf in node.items() if not _is_layer(name)}
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        return rest | {STACKED: nn.meta.add_axis(stacked, 0, LAYERS)}

    return jax.tree.map(stack, tree, is_leaf=lambda node: _has(node, layer_name(0)))


def unstack_layers(tree: Any, n_layer: int) -> Any:
    """Invert `stack_layers`."""

    def unstack(node: Any) -> Any:
        if not _has(node, STACKED):
            return node
        rest = {name: leaf for name, leaf in node.items() if name != STACKED}
        for i in range(n_layer):
            block = jax.tree.map(lambda leaf, i=i: leaf[i], node[STACKED])
            rest[layer_name(i)] = nn.meta.remove_axis(block, 0, LAYERS)
        return rest

    return jax.tree.map(unstack, tree, is_leaf=lambda node: _has(node, STACKED))


def per_layer(params: Any, n_layer: int) -> Any:
    """Return weights with separate layers; unchanged if their layers are not stacked."""
    return unstack_layers(params, n_layer) if STACKED in params else params


def _has(node: Any, name: str) -> bool:
    """Return whether a node of a tree is a dict with this entry."""
    return isinstance(node, dict) and name in node


def _is_layer(name: str) -> bool:
    return name.startswith(f"{STACKED}_")
