"""nanoGPT's weights and recipes. Its Linear layers store W as `[out, in]`; q, k and v are concatenated in `c_attn`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxgpt.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, UserError
from jaxgpt.convert.files import Weights
from jaxgpt.convert.gpt2 import NANOGPT_TABLE, PREFIX
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensors import from_arrays
from jaxgpt.convert.weights import BUFFERS, HEAD, Format
from jaxgpt.errors import short_repr

NANOGPT = Format(NANOGPT_TABLE, PREFIX, f"{PREFIX}wte.weight")

# The settings of a recipe and their minimums.
WHOLE = frozenset(
    "n_layer n_head n_embd block_size batch_size gradient_accumulation_steps max_iters eval_iters".split()
)
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
# Settings of a model, and settings of train.py that a config.json may also contain.
MODEL = "n_layer n_head n_embd block_size vocab_size bias dropout".split()
TRAINING = """
    always_save_checkpoint backend batch_size beta1 beta2 compile dataset decay_lr device dtype eval_interval eval_iters
    eval_only grad_clip gradient_accumulation_steps init_from learning_rate log_interval lr_decay_iters max_iters min_lr
    iter_num best_val_loss out_dir wandb_log wandb_project wandb_run_name warmup_iters weight_decay
""".split()


def config_from_recipe(recipe: Mapping[str, Any], vocab_size: int) -> Config:
    """Convert a recipe with nanoGPT's names to a config. nanoGPT's batch_size is per microbatch, `train.batch_size` per step.

    Raises:
        UserError: a setting is missing or cannot work.
    """
    for name, least in RECIPE.items():
        value = recipe.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
            raise UserError(f"recipe.json: {name} must be a number of at least {least}: {short_repr(value)}")
        if name in WHOLE and not isinstance(value, int):
            raise UserError(f"recipe.json: {name} must be an integer: {value}")
    if recipe.get("dropout", 0.0) != 0.0:
        raise UserError("recipe.json: a run with dropout cannot be replayed: its masks were not recorded")
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
            microbatch=-accumulation,
            eval_every=recipe["eval_interval"],
        ),
    )


def model_from_options(options: Options, weights: Weights) -> ModelConfig:
    """Return the model config of a nanoGPT checkpoint, from its settings and the shapes of its tensors.

    Args:
        options: the `model_args` of a checkpoint, written as config.json, or those in a recipe.json.
        weights: the tensors.

    Raises:
        UserError: if a setting of the model is missing or invalid.
    """
    o = options
    shapes = {name.removeprefix("_orig_mod."): tensor.shape for name, tensor in weights.tensors.items()}
    o.skip(*TRAINING)
    return ModelConfig(
        n_layer=o.integer("n_layer"),
        n_head=o.integer("n_head"),
        n_embd=o.integer("n_embd"),
        block_size=o.integer("block_size"),
        vocab_size=o.integer("vocab_size", 0) or next(iter(shapes.get(NANOGPT.tied, ())), 0),
        bias=o.flag("bias", f"{PREFIX}h.0.attn.c_attn.bias" in shapes),
        dropout=o.number("dropout", 0.0),
        activation="gelu",
    )


def params_from_nanogpt(tensors: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, Any]:
    """Build the tree of weights from tensors with nanoGPT's names.

    Raises:
        UserError: if a tensor is missing, unexpected or of a different shape.
    """
    left = {k: v for k, v in tensors.items() if not k.endswith(BUFFERS)}
    head = left.pop(HEAD, None)
    params = from_arrays(NANOGPT.table, left, config)
    if head is not None and not np.array_equal(head, params["wte"]["embedding"]):
        raise UserError(f"tensor {HEAD} differs from {NANOGPT.tied}: nanoGPT ties them")
    return params
