"""Counts of a model and its training: parameters, FLOPs per token, bytes."""

from __future__ import annotations

from typing import Any, TypedDict

import jax

from jaxgpt.config import Config, LoraConfig
from jaxgpt.model.lora import abstract_trained
from jaxgpt.model.params import Model, abstract_params, config_of, weight_at
from jaxgpt.train.optimizer import make_optimizer


class ModelCounts(TypedDict):
    """The size of a model, and of its training."""

    parameters: int
    active_parameters: int  # parameters that compute one token
    trainable_parameters: int
    modules: dict[str, int]  # parameters of each module, keyed by path
    flops_per_token: int  # FLOPs of training on one token
    bytes: dict[str, int]  # bytes of the train state and its gradients, keyed by part (`state_bytes`)


def model_counts(config: Config) -> ModelCounts:
    """Compute parameter counts, FLOPs per token and bytes from shapes; the vocabulary size must be set."""
    params = abstract_params(config.model)
    return {
        "parameters": parameter_count(params),
        "active_parameters": active_count(config.model, params),
        "trainable_parameters": parameter_count(abstract_trained(config.model, config.lora)),
        "modules": parameter_table(params),
        "flops_per_token": flops_per_token(config.model, params, config.window, config.lora),
        "bytes": state_bytes(config, params),
    }


def parameter_count(params: Any) -> int:
    """Count the parameters of a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def active_count(model: Model, params: Any) -> int:
    """Count the parameters that compute one token; a stack of experts counts as `experts_per_token` matrices."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(_active_size(path, leaf, model) for path, leaf in leaves)


def _active_size(path: tuple[Any, ...], leaf: Any, model: Model) -> int:
    weight = weight_at(path, model)
    config = config_of(model)
    if weight is None or weight.axes[:1] != ("expert",) or not config.n_experts:
        return int(leaf.size)
    return int(leaf.size) // config.n_experts * config.experts_per_token


def parameter_table(params: Any) -> dict[str, int]:
    """Return a dict of the parameter count of every module, including its submodules, keyed by path."""
    table: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [key.key for key in path]
        for depth in range(1, len(names)):
            module = "/".join(names[:depth])
            table[module] = table.get(module, 0) + leaf.size
    return table


def multiplied_parameters(model: Model, params: Any) -> int:
    """Count the parameters in the matrix products of one token: matrices, and a tied token embedding.

    All matrices of a stack count, except that a stack of experts counts as `experts_per_token` matrices. Arguments as for
    `flops_per_token`.
    """
    kinds = ("matrix", "table") if config_of(model).tie_embeddings else ("matrix",)
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        weight = weight_at(path, model)
        if weight is not None and weight.kind in kinds:
            total += _active_size(path, leaf, model)
    return total


def flops_per_token(model: Model, params: Any, T: int, lora: LoraConfig | None = None) -> int:
    """Compute the floating-point operations of training on one token: `6 P + 12 L N H T`.

    P: number of parameters in matrix products, each with 2 operations forward and 4 backward. The second term is attention
    over T tokens in L layers of N heads of width H (PaLM, appendix B). The causal mask and sliding windows are not deducted.
    With adapters, `4 P + 2 A` replaces `6 P`: only the adapted matrices, with A parameters, have a gradient.

    Args:
        model: the model, or its config if it is a GPT.
        params: weights of the model, or their shapes.
        T: tokens per window.
        lora: settings of the adapters.
    """
    config = config_of(model)
    count = multiplied_parameters(model, params)
    gradients = count
    if lora is not None and lora.rank:
        names = lora.targets.replace("+", ",").split(",")
        leaves = jax.tree_util.tree_leaves_with_path(params)
        adapted = [(path, leaf) for path, leaf in leaves if path[-1].key == "kernel" and path[-2].key in names]
        gradients = sum(_active_size(path, leaf, model) for path, leaf in adapted)
    attention = 12 * config.n_layer * config.n_head * config.head_width * T
    return 4 * count + 2 * gradients + attention


def state_bytes(config: Config, params: Any) -> dict[str, int]:
    """Compute the bytes of each part of a train state and of its gradients, without replication."""
    trained = abstract_trained(config.model, config.lora)
    trees = {
        "parameters": (params, trained) if config.lora.rank else params,
        "gradients": trained,
        "optimizer": jax.eval_shape(make_optimizer(config).init, trained),
    }
    if config.optim.ema_decay > 0:
        trees["average"] = trained
    return {kind: bytes_of(tree) for kind, tree in trees.items()}


def bytes_of(tree: Any) -> int:
    """Count the bytes of the arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
