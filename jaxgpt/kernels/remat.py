"""Rematerialization policies: the results of a block that the forward pass saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

ATTENTION_RESULTS = "attention"  # name of the results of attention kernels in policies, as in `checkpoint_name`

_policies = jax.checkpoint_policies
_named = _policies.save_only_these_names(ATTENTION_RESULTS)


def _attention_and(products: Callable[..., Any]) -> Callable[..., Any]:
    """Make a policy that saves the results of attention kernels, and otherwise follows `products`."""

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        # Kernels name their results, except cuDNN attention: match its primitive, because its backward pass needs the results.
        is_cudnn = primitive.name == "dot_product_attention_fwd_wrapper"
        is_attention = is_cudnn or _named(primitive, *avals, **params)
        return is_attention or products(primitive, *avals, **params)

    return policy


# `POLICIES` maps each value of `train.remat` to its policy; None saves everything.
POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": _attention_and(_policies.dots_with_no_batch_dims_saveable),
    "offload": _attention_and(_policies.offload_dot_with_no_batch_dims("device", "pinned_host")),
    "full": _policies.nothing_saveable,
}
