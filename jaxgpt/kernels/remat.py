"""Rematerialization policies: the results of a block that the forward pass saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxgpt.errors import UserError

_policies = jax.checkpoint_policies
_named = _policies.save_only_these_names("attention")  # kernel results are not dots, so they are saved by name
_offload_products = _policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def _kernels(primitive: Any, *avals: Any, **params: Any) -> Any:
    # The results of cuDNN attention, which its backward pass needs, have no name: they are saved by their primitive.
    return primitive.name == "dot_product_attention_fwd_wrapper" or _named(primitive, *avals, **params)


def _offload(primitive: Any, *avals: Any, **params: Any) -> Any:
    return _kernels(primitive, *avals, **params) or _offload_products(primitive, *avals, **params)


# Mapping from each value of `train.remat` to its policy; None saves everything.
POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": _policies.save_from_both_policies(_kernels, _policies.dots_with_no_batch_dims_saveable),
    "offload": _offload,  # as dots, with the products in host memory
    "full": _policies.nothing_saveable,
}


def check_remat(policy: str, device: jax.Device) -> None:
    """Raise `UserError` if programs on a device cannot keep arrays where a policy stores them."""
    if policy == "offload" and "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise UserError(
            f"train.remat offload needs host memory, which a {device.platform} lacks: use --train.remat dots"
        )
