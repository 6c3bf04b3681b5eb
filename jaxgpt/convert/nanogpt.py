"""nanoGPT's weights and recipes. Its Linear layers hold W as (out, in), its heads lie side by side in `c_attn`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxgpt.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, UserError

# A recipe's settings and the least that each can be.
RECIPE = {
    "n_layer": 1,
    "n_head": 1,
    "n_embd": 1,
    "block_size": 1,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_iters": 0,
    "lr_decay_iters": 1,
    "warmup_iters": 0,
    "learning_rate": 0,
    "min_lr": 0,
    "beta1": 0,
    "beta2": 0,
    "weight_decay": 0,
    "grad_clip": 0,
    "eval_interval": 1,
    "eval_iters": 1,
}


def config_from_recipe(recipe: Mapping[str, Any], vocab_size: int) -> Config:
    """A recipe under nanoGPT's names as a config. nanoGPT's batch_size is of one micro-batch, ours of an update.

    Raises:
        UserError: a setting is missing or cannot work.
    """
    for name, least in RECIPE.items():
        value = recipe.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
            raise UserError(f"recipe.json: {name} must be a number of at least {least}, not {value!r}")
    if recipe.get("dropout", 0.0) != 0.0:
        raise UserError("recipe.json: a run with dropout cannot be replayed, its masks were not recorded")
    accumulation = recipe["gradient_accumulation_steps"]
    return Config(
        preset="replay",
        model=ModelConfig(
            vocab_size=vocab_size,
            block_size=recipe["block_size"],
            n_layer=recipe["n_layer"],
            n_head=recipe["n_head"],
            n_embd=recipe["n_embd"],
            bias=bool(recipe.get("bias", False)),
            activation="gelu",
        ),
        data=DataConfig(dataset="none", sampling="random"),
        optim=OptimConfig(
            learning_rate=float(recipe["learning_rate"]),
            min_lr=float(recipe["min_lr"]),
            schedule="cosine",
            warmup_steps=recipe["warmup_iters"],
            decay_steps=recipe["lr_decay_iters"],
            beta1=recipe["beta1"],
            beta2=recipe["beta2"],
            weight_decay=recipe["weight_decay"],
            grad_clip=recipe["grad_clip"],
        ),
        train=TrainConfig(
            steps=recipe["max_iters"] + 1,
            batch_size=recipe["batch_size"] * accumulation,
            accumulation=accumulation,
            eval_every=recipe["eval_interval"],
        ),
    )


def params_from_nanogpt(tensors: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, Any]:
    """Weights under nanoGPT's names as our tree.

    Raises:
        UserError: a tensor is missing, left over or of another shape; its name is said.
    """
    left = {k: v for k, v in tensors.items() if not k.endswith((".attn.bias", ".attn.masked_bias"))}  # mask buffers
    N, H, D, F = config.n_head, config.head_width, config.n_embd, config.mlp_width

    def take(name: str, *shape: int) -> np.ndarray:
        if name not in left:
            raise UserError(f"tensor {name} is missing")
        value = left.pop(name)
        if value.shape != shape:
            raise UserError(f"tensor {name} has the shape {value.shape}, {shape} is expected")
        return np.ascontiguousarray(value, np.float32)

    def linear(
        name: str, n_in: int, n_out: int, shape: tuple[int, ...], bias: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        out = {"kernel": np.ascontiguousarray(take(f"{name}.weight", n_out, n_in).T).reshape(shape)}
        if config.bias:
            out["bias"] = take(f"{name}.bias", n_out).reshape(bias)
        return out

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": take(f"{name}.weight", D)} | ({"bias": take(f"{name}.bias", D)} if config.bias else {})

    def attention(name: str) -> dict[str, Any]:
        packed = linear(f"{name}.c_attn", D, 3 * D, (D, 3, N, H), (3, N, H))
        parts = {
            f"{q}_proj": {"kernel": packed["kernel"][:, i]} | ({"bias": packed["bias"][i]} if config.bias else {})
            for i, q in enumerate("qkv")
        }
        return parts | {"o_proj": linear(f"{name}.c_proj", D, D, (N, H, D), (D,))}

    root = "transformer."
    params: dict[str, Any] = {
        "wte": {"embedding": take(f"{root}wte.weight", config.vocab_size, D)},
        "wpe": {"embedding": take(f"{root}wpe.weight", config.block_size, D)},
        "ln_f": norm(f"{root}ln_f"),
    }
    for layer in range(config.n_layer):
        h = f"{root}h.{layer}"
        params[f"h_{layer}"] = {
            "ln_1": norm(f"{h}.ln_1"),
            "attn": attention(f"{h}.attn"),
            "ln_2": norm(f"{h}.ln_2"),
            "mlp": {
                "up_proj": linear(f"{h}.mlp.c_fc", D, F, (D, F), (F,)),
                "down_proj": linear(f"{h}.mlp.c_proj", F, D, (F, D), (D,)),
            },
        }
    head = left.pop("lm_head.weight", None)
    if head is not None and not np.array_equal(head, params["wte"]["embedding"]):
        raise UserError("tensor lm_head.weight differs from transformer.wte.weight: nanoGPT ties them")
    if left:
        raise UserError(f"tensor {min(left)} is not one of nanoGPT's{f' (and {len(left) - 1} more)' if left else ''}")
    return params
