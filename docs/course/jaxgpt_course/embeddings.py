"""Exercises on embeddings and positions: embedding, rope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgpt.ops.rotary import Llama3Scaling, rope_frequencies, rope_rotation, rotate
from jaxgpt_course.exercise import Exercise, normal

Array = np.ndarray


# embedding


def embed(ids: Any, starts_B: Any, T: int, wte_VD: Any, wpe_TD: Any) -> Any:
    windows = jnp.asarray(ids)[jnp.asarray(starts_B)[:, None] + jnp.arange(T + 1)[None]]
    return jnp.asarray(wte_VD)[windows[:, :-1]] + jnp.asarray(wpe_TD)[:T][None], windows[:, 1:]


def _embed(
    shift: int = 1,
    positions: Callable[[Array, Array], Array] = lambda positions_T, starts_B: positions_T[None],
    table: Callable[[Array, Array, Array], Array] = lambda wte, wpe, where: wpe[where],
) -> Callable[..., Any]:
    """Make an embedding of windows, correct by default; an argument adds a deliberate bug."""

    def embed(ids: Array, starts_B: Array, T: int, wte_VD: Array, wpe_TD: Array) -> Any:
        places_BT = starts_B[:, None] + np.arange(T)
        where_BT = positions(np.arange(T), starts_B) % len(wpe_TD)
        return wte_VD[ids[places_BT]] + table(wte_VD, wpe_TD, where_BT), ids[places_BT + shift]

    return embed


EMBEDDING = Exercise(
    name="embedding",
    page="embeddings",
    aliases=("embed", "batch"),
    statement="Make a batch and its embeddings. Cut windows of T inputs from the ids of a text, one at each start; the target "
    "of a position is the id that follows. Embed an input as its row of wte plus the row of wpe of its position in the window. "
    "Return the embeddings [B, T, D] and the targets [B, T].",
    returns=("x_BTD", "targets_BT"),
    reference=embed,
    inputs=lambda: {
        "three windows of 4": (
            (np.arange(20) * 7 % 11).astype(np.int32),
            np.array([0, 5, 13]),
            4,
            normal(0, 11, 3),
            normal(1, 4, 3),
        ),
        "a longer table of positions": (
            (np.arange(30) * 5 % 11).astype(np.int32),
            np.array([2, 24]),
            3,
            normal(2, 11, 3),
            normal(3, 8, 3),
        ),
        "windows of 1": (
            (np.arange(9) * 4 % 11).astype(np.int32),
            np.array([6, 1]),
            1,
            normal(4, 11, 2),
            normal(5, 2, 2),
        ),
    },
    mistakes=(
        ("the targets are the inputs: the target of a position is the id after it", _embed(shift=0)),
        ("the targets are two ids ahead: the target of a position is the next id", _embed(shift=2)),
        (
            "the positions are missing: add the row of wpe of each position",
            _embed(table=lambda wte, wpe, where: np.zeros_like(wpe[where])),
        ),
        (
            "the positions are counted in the text: position t of a window uses row t of wpe, wherever the window starts",
            _embed(positions=lambda positions_T, starts_B: starts_B[:, None] + positions_T),
        ),
        (
            "the positions start at 1: the first input of a window has position 0",
            _embed(positions=lambda positions_T, starts_B: positions_T[None] + 1),
        ),
    ),
)


# rope


def rope(x_TH: Any, theta: float) -> Any:
    T, H = x_TH.shape
    rotation = rope_rotation(jnp.arange(T)[None], rope_frequencies(H, theta, Llama3Scaling()))
    return rotate(jnp.asarray(x_TH)[None, :, None], rotation)[0, :, 0]


def _rope(
    first: int = 0,
    exponent: Callable[[int], Array] = lambda H: np.arange(0, H, 2) / H,
    turn: float = 1.0,
    pairs_of_neighbors: bool = False,
    interleaved: bool = False,
    reflect: bool = False,
    base: float = 0.0,
) -> Callable[..., Any]:
    """Make a rotation, correct by default; an argument adds a deliberate bug."""

    def rope(x_TH: Array, theta: float) -> Array:
        T, H = x_TH.shape
        angle = turn * (first + np.arange(T))[:, None] * (base or theta) ** -exponent(H)
        cos, sin = np.cos(angle), np.sin(angle)
        x1, x2 = (x_TH[:, ::2], x_TH[:, 1::2]) if pairs_of_neighbors else (x_TH[:, : H // 2], x_TH[:, H // 2 :])
        y1, y2 = x1 * cos - x2 * sin, x2 * cos + (-1 if reflect else 1) * x1 * sin
        out = np.stack([y1, y2], -1).reshape(T, H) if interleaved else np.concatenate([y1, y2], 1)
        return out.astype(np.float32)

    return rope


def _keeps_lengths(y_TH: Array, x_TH: Array, theta: float) -> str | None:
    if not np.allclose(y_TH[0], x_TH[0], atol=1e-5):
        return "position 0 changes: its angle is 0"
    if not np.allclose((y_TH**2).sum(-1), (x_TH**2).sum(-1), rtol=1e-3):
        return (
            "the lengths of the vectors change, so this is not a rotation: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin"
        )
    return None


ROPE = Exercise(
    name="rope",
    page="llama",
    aliases=("rotary",),
    statement="Apply rotary positions to a query or key [T, H]: at position t, rotate each pair (x[i], x[i + H/2]) by the "
    "angle t * theta^(-2i/H), for i from 0 to H/2 - 1.",
    returns=("y_TH",),
    reference=rope,
    inputs=lambda: {
        "6 positions of width 8": (normal(0, 6, 8), 10_000.0),
        "a small theta": (normal(1, 9, 6), 10.0),
        "one pair": (normal(2, 5, 2), 10_000.0),
        "one position": (normal(3, 1, 4), 10_000.0),
    },
    mistakes=(
        ("the function turns in the opposite direction: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin", _rope(turn=-1.0)),
        (
            "the pairs are (x[2i], x[2i + 1]), as in the paper: in this exercise, pair x[i] with x[i + H/2]",
            _rope(pairs_of_neighbors=True, interleaved=True),
        ),
        (
            "the pairs are (x[2i], x[2i + 1]), and the result has two halves: rotate the pairs (x[i], x[i + H/2])",
            _rope(pairs_of_neighbors=True),
        ),
        (
            "the halves of the result are interleaved: concatenate them, all y1 before all y2",
            _rope(interleaved=True),
        ),
        ("theta is ignored: compute the angle from theta, not from 10,000", _rope(base=10_000.0)),
        ("the positions start at 1: the first vector has position 0 and is not rotated", _rope(first=1)),
        ("the exponent is -i/H: use -2i/H", _rope(exponent=lambda H: np.arange(H // 2) / H)),
        (
            "all pairs turn at the same speed: the angle of pair i is t * theta^(-2i/H)",
            _rope(exponent=lambda H: np.zeros(H // 2)),
        ),
        ("one sign is wrong: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin", _rope(reflect=True)),
    ),
    laws=(_keeps_lengths,),
)
