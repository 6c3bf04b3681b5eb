"""LoRA: low-rank adapters of frozen weights, as functions of parameter trees (Hu et al. 2022, sec. 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import LoraConfig
from jaxgpt.errors import UserError, short_repr
from jaxgpt.model.params import Model, Weight, abstract_params, flatten_params, map_weights
from jaxgpt.ops.random import fold_in_name
from jaxgpt.settings import as_int
from jaxgpt.suggestions import did_you_mean

TARGETS = ("q_proj", "v_proj")


def init_lora(key: jax.Array, params: Any, rank: int, targets: Sequence[str] = TARGETS) -> Any:
    """Initialize adapters: `A ~ U(-1/sqrt(I), 1/sqrt(I))` with I inputs; B = 0, so W is unchanged.

    Args:
        key: random key for the values of A.
        params: the weights to adapt, with unstacked layers. If weights are in linen's boxes, so are the adapters.
        rank: r, the inner dimension of the product A B.
        targets: the matrices to adapt, such as "q_proj". "q_proj+k_proj+v_proj" adapts matrices with the same input through
            one shared A, as an adapter of GPT-2's fused matrix does.

    Returns:
        Nested dicts like `params`, with `{"a": [inputs, r], "b": {"q_proj": [r, outputs]}}` at each target. Each matrix of a
        stack `[E, inputs, outputs]` has its own adapter: `[E, inputs, r]` and `[E, r, outputs]`.

    Raises:
        UserError: if `rank` is below 1, a target is not a matrix of the model, or combined matrices have different inputs.
    """
    rank = as_int("rank", rank, 1, 2**31 - 1)
    adapters = _adapters_below(key, params, "", rank, targets)
    used = _adapter_names(adapters)
    for target in targets:
        if target not in used:
            known = matrices(nn.unbox(params))
            near = did_you_mean(target, known)
            raise UserError(f"no matrix {short_repr(target)} to adapt{near}: use one of {', '.join(known)}")
    return adapters


def _adapters_below(key: jax.Array, params: Any, path: str, rank: int, targets: Sequence[str]) -> dict[str, Any]:
    """Initialize the adapters of the targets in the weights below a path, such as "h_0/"; "": in all weights.

    Modules without targets are omitted.
    """
    modules = {name: child for name, child in params.items() if isinstance(child, dict)}
    found = {}
    for name, module in modules.items():
        adapters = _adapters_below(key, module, f"{path}{name}/", rank, targets)
        if adapters:
            found[name] = adapters

    for target in targets:
        names = target.split("+")
        if not all("kernel" in modules.get(name, {}) for name in names):
            continue
        # The path makes the values of an adapter independent of the other targets and layers.
        adapter_key = fold_in_name(key, f"{path}{target}")
        kernels = {name: modules[name]["kernel"] for name in names}
        found[target] = _init_adapter(adapter_key, kernels, rank)
    return found


def _init_adapter(key: jax.Array, kernels: dict[str, Any], rank: int) -> dict[str, Any]:
    """Initialize the adapter of matrices, or stacks of matrices, with the same inputs; in boxes if the matrices are."""
    _check_same_inputs(kernels)
    shapes = {name: nn.unbox(kernel).shape for name, kernel in kernels.items()}
    adapter = _draw_adapter(key, shapes, rank)
    are_boxed = all(isinstance(kernel, nn.Partitioned) for kernel in kernels.values())
    return _box_adapter(adapter, kernels) if are_boxed else adapter


def _check_same_inputs(kernels: dict[str, Any]) -> None:
    """Raise `UserError` unless the matrices have the same inputs: equal widths and, in boxes, equal names of axes.

    The inputs of q_proj and o_proj may have equal widths, but their axes have different names.
    """
    inputs = set()
    for kernel in kernels.values():
        shape = nn.unbox(kernel).shape
        axes = kernel.names if isinstance(kernel, nn.Partitioned) else ()
        inputs.add((shape[:-1], axes[:-1]))
    if len(inputs) > 1:
        raise UserError(f"{'+'.join(kernels)} have different inputs and cannot share an A: use {','.join(kernels)}")


def _draw_adapter(key: jax.Array, shapes: dict[str, tuple[int, ...]], rank: int) -> dict[str, Any]:
    """Draw a random A, and make a zero B for each matrix, given the shapes of the matrices."""
    *stack, fan_in, _ = next(iter(shapes.values()))
    bound = 1 / math.sqrt(fan_in)
    a = jax.random.uniform(key, (*stack, fan_in, rank), jnp.float32, -bound, bound)
    b = {name: jnp.zeros((*stack, rank, shape[-1]), jnp.float32) for name, shape in shapes.items()}
    return {"a": a, "b": b}


def _box_adapter(adapter: dict[str, Any], kernels: dict[str, Any]) -> dict[str, Any]:
    """Put A and B in boxes like those of their matrices.

    The axes `(*stack, input, output)` of a matrix become `(*stack, input, "rank")` of A and `(*stack, "rank", output)` of B.
    """
    b = {}
    for name, box in kernels.items():
        *stack, _, output = box.names
        b[name] = box.replace(value=adapter["b"][name], names=(*stack, "rank", output))

    box, *_ = kernels.values()  # the matrices have the same inputs
    *stack_and_input, _ = box.names
    a = box.replace(value=adapter["a"], names=(*stack_and_input, "rank"))
    return {"a": a, "b": b}


def is_adapter(node: dict[str, Any]) -> bool:
    """Return whether a node of a tree of adapters is an adapter, not a module that contains adapters."""
    return "a" in node


def _adapter_names(adapters: dict[str, Any]) -> set[str]:
    """Return the targets of all adapters."""
    names = set()
    for name, node in adapters.items():
        if is_adapter(node):
            names.add(name)
        else:
            names |= _adapter_names(node)
    return names


def merge(params: Any, adapters: Any, alpha: float = 16.0) -> Any:
    """Merge adapters into the weights: `W + (alpha / r) A B`; weights without an adapter are unchanged.

    Args:
        params: the frozen weights, unstacked or stacked (`model/scan.py`).
        adapters: result of `init_lora`, in the layout of `params`.
        alpha: numerator of the scale `alpha / r`.

    Raises:
        UserError: if the adapters do not match the model.
    """
    merged = dict(params)
    for name, adapter in adapters.items():
        if not is_adapter(adapter):
            merged[name] = merge(params.get(name, {}), adapter, alpha)
            continue

        for kernel, b in adapter["b"].items():
            if kernel not in merged:
                raise UserError(
                    f"adapters do not match the model: no matrix {kernel}; use the model they were trained on"
                )
            w = _merge_matrix(kernel, merged[kernel]["kernel"], adapter["a"], b, alpha)
            merged[kernel] = merged[kernel] | {"kernel": w}
    return merged


def _merge_matrix(name: str, w: jax.Array, a: jax.Array, b: jax.Array, alpha: float) -> jax.Array:
    """Compute `W + (alpha / r) A B`; raise `UserError` if the shapes do not match."""
    *stack, inputs, outputs = w.shape
    rank = a.shape[-1]
    if a.shape != (*stack, inputs, rank) or b.shape != (*stack, rank, outputs):
        raise UserError(
            f"adapters do not match the model: {name} is {list(w.shape)}, A {list(a.shape)}, B {list(b.shape)}; "
            "use the model they were trained on"
        )
    scale = alpha / rank
    change = scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return w + change


def matrices(params: Any) -> list[str]:
    """List the names of the matrices that adapters can change."""
    found = dict[str, None]()  # an ordered set
    for path in flatten_params(params):
        *_, module, leaf = path.split("/")
        if leaf == "kernel":
            found[module] = None
    return list(found)


def model_adapters(key: jax.Array, params: Any, lora: LoraConfig) -> Any:
    """Initialize the adapters of a config; its targets must be names of the model's matrices."""
    return init_lora(key, params, lora.rank, lora.targets.split(","))


def boxed_trained(model: Model, lora: LoraConfig) -> Any:
    """Return the shapes and dtypes of a run's trainable parameters, weights or adapters, in linen's boxes.

    Raises:
        UserError: if `init_lora` rejects `lora.targets`.
    """
    params = abstract_params(model)

    def box(weight: Weight | None, leaf: Any) -> nn.Partitioned[Any]:
        axes = weight.axes if weight else ()
        return nn.Partitioned(leaf, names=axes)

    boxed = map_weights(box, params, model)
    if not lora.rank:
        return boxed
    return jax.eval_shape(lambda boxed: model_adapters(jax.random.key(0), boxed, lora), boxed)


def abstract_trained(model: Model, lora: LoraConfig) -> Any:
    """Return `boxed_trained` without boxes."""
    return nn.unbox(boxed_trained(model, lora))
