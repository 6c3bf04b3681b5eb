"""Convert between the two layouts of the blocks' weights.

Unstacked (`h_0`, `h_1`, ...) is the layout of checkpoints, exports and decoding. Stacked is one `h` with a leading
layer axis in each leaf: `GPT` runs it as a `lax.scan` over one block, so that compile time does not depend on the
number of layers.
"""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

STACKED = "h"


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
        blocks = [node[layer_name(layer)] for layer in range(sum(_is_layer(name) for name in node))]
        rest = {name: leaf for name, leaf in node.items() if not _is_layer(name)}
        return rest | {STACKED: _name_axis(jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks), "add_axis")}

    return jax.tree.map(stack, tree, is_leaf=lambda node: _has(node, layer_name(0)))


def unstack_layers(tree: Any, n_layer: int) -> Any:
    """Invert `stack_layers`."""

    def unstack(node: Any) -> Any:
        if not _has(node, STACKED):
            return node
        rest = {name: leaf for name, leaf in node.items() if name != STACKED}
        blocks = (jax.tree.map(lambda leaf, i=i: leaf[i], node[STACKED]) for i in range(n_layer))
        return rest | {layer_name(i): _name_axis(block, "remove_axis") for i, block in enumerate(blocks)}

    return jax.tree.map(unstack, tree, is_leaf=lambda node: _has(node, STACKED))


def _has(node: Any, name: str) -> bool:
    return isinstance(node, dict) and name in node


def _is_layer(name: str) -> bool:
    return name.startswith(f"{STACKED}_")


def _name_axis(tree: Any, change: Literal["add_axis", "remove_axis"]) -> Any:
    """Add or remove the layer axis in the logical axes of boxed leaves."""

    def is_box(leaf: Any) -> bool:
        return isinstance(leaf, nn.Partitioned)

    def name(leaf: Any) -> Any:
        return getattr(leaf, change)(0, {nn.PARTITION_NAME: "layers"}) if is_box(leaf) else leaf

    return jax.tree.map(name, tree, is_leaf=is_box)
