"""Texts with a common beginning as a tree, which a model computes in one row without repeating a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxgpt.ops.attention import Edit, Visible, attend

BREAK_EVEN = 1 << 9  # lower bound on the number of scores that cost as much as the other work of a position


class Tree:
    """The ids of several texts as a tree: the common beginning of several texts is computed once.

    The nodes are stored in depth-first order. A token attends to itself and to its ancestors, the tokens before it in its text.

    Example: the inputs `[5, 6, 7]`, `[5, 6, 8, 9]` and `[5, 6, 8]`
        ids       5 6 7 8 9
        position  0 1 2 2 3
        end       5 5 3 5 5
        paths     [0, 1, 2], [0, 1, 3, 4] and [0, 1, 3]

    Attributes:
        ids: id of each node.
        position: position of each node in its texts.
        end: node after the last descendant of each node.
        paths: the nodes of each text, keyed by the index of the text.
        branches: whether a node has several children; otherwise, all texts are beginnings of one text.
    """

    def __init__(self, text: int, inputs: list[int]) -> None:
        nodes = list(range(len(inputs)))
        self.ids = list(inputs)
        self.position = list(nodes)
        self.end = [len(inputs)] * len(inputs)
        self.paths = {text: nodes}
        self.branches = False
        self._last = nodes

    def common(self, inputs: list[int]) -> int:
        """Return the number of nodes that a further text shares with the last text."""
        for n, (node, i) in enumerate(zip(self._last, inputs, strict=False)):
            if self.ids[node] != i:
                return n
        return min(len(self._last), len(inputs))

    def add(self, text: int, inputs: list[int]) -> None:
        """Add the next text in the order of the ids."""
        common = self.common(inputs)
        before = len(self.ids)
        after = before + len(inputs) - common
        self.branches |= common < min(before, len(inputs))
        shared = self._last[:common]
        new = list(range(before, after))

        self.ids += inputs[common:]
        self.position += range(common, len(inputs))
        self.end += [after] * len(new)
        for node in shared:
            self.end[node] = after
        self.paths[text] = shared + new
        self._last = self.paths[text]


def shared_rows(inputs: Sequence[list[int]], longest: int, may_branch: bool) -> list[Tree]:
    """Return the rows that compute all texts; neighbors in the order of their ids share a row if that is less work.

    Args:
        inputs: the ids of each text.
        longest: maximum number of nodes of a row with branches.
        may_branch: whether a row may have branches; otherwise, texts share a row only if they are beginnings of one text.
    """
    rows: list[Tree] = []
    for n in sorted(range(len(inputs)), key=lambda n: inputs[n]):
        if rows and _joins(rows[-1], inputs[n], longest, may_branch):
            rows[-1].add(n, inputs[n])
        else:
            rows.append(Tree(n, inputs[n]))
    return rows


def _joins(row: Tree, inputs: list[int], longest: int, may_branch: bool) -> bool:
    """Return whether to add a text to the row of the previous text in the order of their ids."""
    common = row.common(inputs)
    before = len(row.ids)
    after = before + len(inputs) - common
    is_whole = common in (before, len(inputs))  # one text is the beginning of the other: nothing is computed twice
    if is_whole or not may_branch:
        return is_whole
    more_scores = after**2 - before**2 - len(inputs) ** 2
    return after <= longest and more_scores <= common * BREAK_EVEN


@dataclass(frozen=True)
class Ancestors(Visible):
    """The keys that a node of a tree attends to: its ancestors and itself, within the window.

    Attributes:
        end_BT: node after the last descendant of each node.
    """

    end_BT: jax.Array = field(kw_only=True)

    def mask(self) -> jax.Array:
        """Return the attention mask, bool `[B, 1, T, T]`."""
        node_T = jnp.arange(self.end_BT.shape[1])
        query_1T1 = node_T[None, :, None]
        key_11T = node_T[None, None, :]
        descends_BTT = (query_1T1 >= key_11T) & (query_1T1 < self.end_BT[:, None, :])
        return super().mask() & descends_BTT[:, None]


def attend_to_ancestors(
    end_BT: jax.Array,
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKHS: jax.Array,
    visible: Visible,
    scale: float,
    edit: Edit | None = None,
) -> jax.Array:
    """Compute `ops.attention.attend` among the nodes of trees."""
    ancestors = Ancestors(visible.query, window=visible.window, end_BT=end_BT)
    return attend(q_BTNH, k_BKSH, v_BKHS, ancestors, scale, edit)
