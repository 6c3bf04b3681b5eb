"""nanoGPT's weights. Its Linear layers store W as `[out, in]`; q, k and v are concatenated in `c_attn`."""

from __future__ import annotations

from jaxgpt.config import ModelConfig
from jaxgpt.convert.files import Weights
from jaxgpt.convert.gpt2 import NANOGPT_TABLE, PREFIX
from jaxgpt.convert.options import Options
from jaxgpt.convert.weights import STRAY, Format

NANOGPT = Format(NANOGPT_TABLE, PREFIX, f"{PREFIX}wte.weight")

# Settings of train.py that a config.json may also contain.
TRAINING = """
    always_save_checkpoint backend batch_size beta1 beta2 compile dataset decay_lr device dtype eval_interval eval_iters
    eval_only grad_clip gradient_accumulation_steps init_from learning_rate log_interval lr_decay_iters max_iters min_lr
    iter_num best_val_loss out_dir wandb_log wandb_project wandb_run_name warmup_iters weight_decay
""".split()


def model_from_options(options: Options, weights: Weights) -> ModelConfig:
    """Return the model config of a nanoGPT checkpoint, from its settings and the shapes of its tensors.

    Args:
        options: the `model_args` of a checkpoint, written as config.json.
        weights: the tensors.

    Raises:
        UserError: if a setting of the model is missing or invalid.
    """
    o = options
    shapes = {name.removeprefix(STRAY): tensor.shape for name, tensor in weights.tensors.items()}
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
