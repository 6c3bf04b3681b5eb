"""Attention kernels of hardware that is not present, for estimates: the arrays that they save, and their FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from jaxgpt.kernels.flash import LANES, cudnn_attention, splash_attention
from jaxgpt.kernels.remat import ATTENTION_RESULTS
from jaxgpt.kernels.sharded import gathered_attention, halo_attention, ring_attention
from jaxgpt.kernels.sharded_splash import ShardedSplash
from jaxgpt.ops import Array, AttendFn
from jaxgpt.ops.attention import Edit, Visible, attend

# An operation that is never compiled. Its parameters are `results`, the shape and dtype of each result, and `flops`, its cost.
KERNEL = Primitive("attention_kernel")
KERNEL.multiple_results = True


def _shapes(*_: Any, results: tuple[tuple[tuple[int, ...], Any], ...], flops: float) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in results]


KERNEL.def_abstract_eval(_shapes)


@dataclass(frozen=True)
class KernelShape:
    """An attention function that is traced as a fused kernel (Dao et al. 2022), and cannot run.

    For the backward pass, a kernel saves q, k, v, its output and a sum for each row (the logsumexp of its scores). The forward
    pass has two products over the visible pairs of query and key. The backward pass has five products, because it computes the
    scores again.

    Attributes:
        head_multiple: the stored vector of a head is padded to a multiple of this width.
        sum_width: number of elements that store the sum of a row.
    """

    head_multiple: int = 1
    sum_width: int = 1

    def __call__(
        self, q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
    ) -> Array:
        """Trace a kernel with the result shape of `ops.attention.attend`; with an edit or a cache, call `attend` instead."""
        if edit or visible.key:
            return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
        head_width = self.head_multiple * math.ceil(q_BTNH.shape[-1] / self.head_multiple)
        return _attend(q_BTNH, k_BKSH, v_BKHS, KernelSizes(head_width, self.sum_width, visible.window))


class KernelSizes(NamedTuple):
    """The sizes of a kernel that the shapes of its arguments do not show."""

    head_width: int  # stored width of a head, W in the names of arrays
    sum_width: int  # number of elements that store the sum of a row
    window: int  # maximum number of keys of a query; 0: unlimited


# The kernels without stored T x T scores. A TPU stores vectors in rows of 128 lanes, and splash attention stores the sum of
# each row repeated in 128 lanes.
KERNEL_SHAPES: dict[Any, KernelShape] = {
    splash_attention: KernelShape(head_multiple=LANES, sum_width=LANES),
    ShardedSplash(): KernelShape(head_multiple=LANES),
    cudnn_attention: KernelShape(),
    gathered_attention: KernelShape(),
    ring_attention: KernelShape(),
    halo_attention: KernelShape(),
}


def traceable(attention: AttendFn) -> AttendFn:
    """Return the attention function to trace: the shape of a fused kernel, otherwise the given function.

    The kernels themselves cannot be traced everywhere (cuDNN) or take seconds to trace (splash).
    """
    return KERNEL_SHAPES.get(attention, attention)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, sizes: KernelSizes) -> Array:
    out_BTNH, _ = _forward(q_BTNH, k_BKSH, v_BKHS, sizes)
    return out_BTNH


class SavedArrays(NamedTuple):
    """The arrays that a kernel saves for the backward pass."""

    q_BNTW: Array
    k_BKSW: Array
    v_BKSW: Array
    out_BNTW: Array
    sum_BNT: Array  # with a last dimension of `KernelSizes.sum_width`


def _forward(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, sizes: KernelSizes) -> tuple[Array, SavedArrays]:
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    dtype = q_BTNH.dtype
    of_queries = (B, N, T, sizes.head_width), dtype
    of_keys = (B, K, S, sizes.head_width), dtype
    q_BNTW, k_BKSW, v_BKSW = KERNEL.bind(q_BTNH, k_BKSH, v_BKHS, results=(of_queries, of_keys, of_keys), flops=0.0)

    sums = (B, N, T, sizes.sum_width), jnp.dtype("float32")
    flops = 2 * product_flops(q_BTNH.shape, sizes.window)
    out_BNTW, sum_BNT = KERNEL.bind(q_BNTW, k_BKSW, v_BKSW, results=(of_queries, sums), flops=flops)
    out_BNTW = checkpoint_name(out_BNTW, ATTENTION_RESULTS)
    sum_BNT = checkpoint_name(sum_BNT, ATTENTION_RESULTS)
    out_BTNH = out_BNTW[..., :H].swapaxes(1, 2)
    return out_BTNH, SavedArrays(q_BNTW, k_BKSW, v_BKSW, out_BNTW, sum_BNT)


def _backward(sizes: KernelSizes, saved: SavedArrays, dout_BTNH: Array) -> tuple[Array, ...]:
    B, T, N, H = dout_BTNH.shape
    K, S = saved.k_BKSW.shape[1:3]
    dtype = dout_BTNH.dtype
    of_q = (B, T, N, H), dtype
    of_k = (B, K, S, H), dtype
    of_v = (B, K, H, S), dtype
    flops = 5 * product_flops(dout_BTNH.shape, sizes.window)
    return tuple(KERNEL.bind(*saved, dout_BTNH, results=(of_q, of_k, of_v), flops=flops))


_attend.defvjp(_forward, _backward)


def product_flops(shape: tuple[int, ...], window: int) -> float:
    """Compute the FLOPs of one product over the visible pairs of query and key: `2 H` per pair, row and head.

    Query i sees `min(i + 1, window)` keys. Kernels compute whole tiles, so the result is a lower bound.

    Args:
        shape: shape of the queries, `[B, T, N, H]`.
        window: maximum number of keys of a query; 0: T.
    """
    B, T, N, H = shape
    width = min(window or T, T)
    pairs = width * (width + 1) // 2 + (T - width) * width
    return 2.0 * B * N * H * pairs
