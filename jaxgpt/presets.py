"""Presets: named configs, each with a description and, if recorded, an expected result.

Expected results are recorded measurements (docs/performance.md, or the cited source).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.suggestions import did_you_mean

DEFAULT = "python-char"
# Python's standard library as text. The validation split is small, so that an evaluation takes seconds.
PYTHON = DataConfig(dataset="python", train_fraction=0.985)
SHAKESPEARE = DataConfig(dataset="shakespeare")


class Preset(NamedTuple):
    """A named config.

    Attributes:
        about: description in one or two sentences.
        config: settings of the preset.
        expect: result of a recorded run; empty: not recorded.
        options: required options of `jaxgpt train PRESET`.
    """

    about: str
    config: Config
    expect: str = ""
    options: str = ""


def preset(name: str) -> Config:
    """Return the config of a preset.

    Raises:
        UserError: if no preset has this name.
    """
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}{did_you_mean(name, PRESETS)}: use one of {', '.join(PRESETS)}")
    return replace(PRESETS[name].config, preset=name)


def command(name: str) -> str:
    """Return the command that trains a preset."""
    return f"jaxgpt train {name} {PRESETS[name].options}".rstrip()


# This is jaxgpt's architecture for small models.
MODERN = ModelConfig(positions="rope", norm="rmsnorm", qk_norm=True, activation="relu2", bias=False, init="zero-proj")


def _modern(*, n_layer: int, n_head: int, n_embd: int, block_size: int) -> ModelConfig:
    return replace(
        MODERN,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        block_size=block_size,
        # The window has no effect in training. Beyond the context, it limits attention to distances seen in training.
        sliding_window=block_size,
    )


# Muon updates the matrices of the blocks, and AdamW the remaining weights; the learning rate decays linearly to zero.
MUON = OptimConfig(
    name="muon", learning_rate=4e-3, min_lr=0.0, schedule="linear", warmup_steps=50, beta2=0.95, weight_decay=0.0
)
ADAMW = OptimConfig(learning_rate=3e-3, min_lr=0.0, schedule="linear", warmup_steps=50, beta2=0.95, weight_decay=0.1)
# Sizes for a CPU: a model of 0.8 million parameters, and 300 training steps.
SMALL = _modern(n_layer=4, n_head=4, n_embd=128, block_size=128)
SHORT = TrainConfig(steps=300, batch_size=32, eval_every=100, eval_windows=96, prompt="def ", sample_tokens=400)

NANOGPT = ModelConfig(activation="gelu", bias=False)
NANOGPT_OPTIM = OptimConfig(
    learning_rate=1e-3, min_lr=1e-4, warmup_steps=100, decay_steps=2000, beta2=0.99, weight_decay=0.1, grad_clip=1.0
)

# This is nanoGPT's recipe: 480 windows of 1,024 tokens per step (491,520 tokens), in microbatches of at most 12 per device.
GPT2 = Config(
    model=ModelConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768),
    data=DataConfig(dataset="none", tokenizer="gpt2", sampling="random"),
    optim=replace(NANOGPT_OPTIM, learning_rate=6e-4, min_lr=6e-5, warmup_steps=2000, decay_steps=600_000, beta2=0.95),
    train=TrainConfig(steps=600_001, batch_size=480, accumulation=40, eval_every=1000, compute_dtype="bfloat16"),
)
OF_TOKENS = "--data.path DIRECTORY_OF_BIN_FILES"  # required options of presets that train on prepared token ids

# fmt: off
PRESETS = {
    "python-char": Preset(
        "A character-level model of Python's standard library; needs no download.",
        Config(model=SMALL, data=PYTHON, optim=MUON, train=SHORT),
        "validation loss 1.31 in 80 seconds on 2 cores",
    ),
    "moe-char": Preset(
        "A character-level model with 8 experts in each layer; 2 of them compute each token.",
        Config(
            model=replace(_modern(n_layer=2, n_head=4, n_embd=64, block_size=64), n_inner=128,
                          n_experts=8, experts_per_token=2),
            data=PYTHON,
            optim=MUON,
            train=replace(SHORT, steps=300, steps_per_call=10, eval_every=300, sample_tokens=200),
        ),
        "validation loss 1.57 in 54 seconds of CPU time",
    ),
    "shakespeare": Preset(
        "A character-level model of Shakespeare's plays, sized for a CPU.",
        Config(model=SMALL, data=SHAKESPEARE, optim=MUON, train=replace(SHORT, steps=400, prompt="ROMEO:")),
        "validation loss 1.59 in 2.5 minutes on 2 cores",
    ),
    "shakespeare-fast": Preset(
        "Reaches the loss of nanoGPT's CPU recipe in seconds: a small model, an untied head and high learning rates for Muon.",
        Config(
            model=replace(_modern(n_layer=2, n_head=4, n_embd=64, block_size=64), tie_embeddings=False),
            data=SHAKESPEARE,
            # A momentum of 0.95 is too slow for 240 steps.
            optim=replace(MUON, warmup_steps=5, learning_rate=0.03, beta1=0.8, muon_ratio=2.0, muon_momentum=0.85,
                          muon_steps=4),
            train=TrainConfig(steps=240, batch_size=24, steps_per_call=10, eval_every=240, eval_batch_size=128,
                              prompt="ROMEO:"),
        ),
        "validation loss 1.85 in 7 seconds on 2 cores, including startup and evaluation; 11 seconds the first time",
    ),
    "statquest": Preset(
        'StatQuest\'s decoder-only transformer: five words, width 2, 37 parameters. Learns to answer "awesome <EOS>".',
        Config(
            model=ModelConfig(block_size=5, n_layer=1, n_head=1, n_embd=2,
                              positions="sinusoidal", norm="none", final_norm=False, mlp="none", bias=False,
                              attn_proj=False, tie_embeddings=False, head_bias=True, init="torch"),
            data=DataConfig(dataset="statquest", tokenizer="word", train_fraction=1.0, stride=6),
            optim=OptimConfig(learning_rate=0.1, schedule="constant", warmup_steps=0, beta2=0.999, weight_decay=0.0,
                              grad_clip=0.0),
            train=TrainConfig(steps=60, batch_size=1, eval_every=60, log_every=1,
                              prompt="what is statquest <EOS>", sample_tokens=2),
            mesh=MeshConfig(data=1),
        ),
        "loss 0.14 and both questions answered, in 5 seconds on 2 cores",
    ),
    "induction": Preset(
        "Two layers of attention without MLPs, on repeated random strings: the loss drops when an induction head forms.",
        Config(
            model=replace(_modern(n_layer=2, n_head=4, n_embd=64, block_size=64), mlp="none"),
            data=DataConfig(dataset="repeats"),
            optim=MUON,
            # docs/tools/induction.py scores the heads of each checkpoint.
            train=TrainConfig(steps=1000, batch_size=32, eval_every=500, checkpoint_every=50, keep_every=50,
                              prompt="QuickBrownFoxQuick", sample_tokens=8),
        ),
        "validation loss 2.77 in 49 seconds of CPU time, and a head with an induction score of 0.46",
    ),
    # The original decoder, `GPT.apply(..., method="stack")`, has no embedding and no head: both are added for training.
    "numpy-minimal": Preset(
        "A minimal NumPy decoder: one head, no biases, ReLU, and post-norm that divides by (std + 1e-5).",
        Config(
            model=ModelConfig(block_size=64, n_layer=2, n_head=1, n_embd=64, n_inner=128,
                              positions="sinusoidal", norm="stdnorm", norm_position="post", norm_affine=False,
                              final_norm=False, activation="relu", bias=False, attn_proj=False, init_std=0.1),
            data=PYTHON,
            optim=ADAMW,
            train=replace(SHORT, steps=500, steps_per_call=10, eval_every=250, sample_tokens=200),
        ),
        "validation loss 2.18 in 36 seconds on 2 cores",
    ),
    # PyTorch rejects `TransformerDecoderLayer(x, memory=None)`. Without cross-attention, this layer is a
    # `TransformerEncoderLayer` with a causal mask, as here.
    "torch-decoder": Preset(
        "Six post-norm layers with PyTorch's defaults: sinusoidal positions, ReLU, 8 heads, biases, width 512, context 512.",
        Config(
            model=ModelConfig(block_size=512, n_layer=6, n_head=8, n_embd=512,
                              positions="sinusoidal", norm_position="post", activation="relu", tie_embeddings=False,
                              head_bias=True, dropout=0.1),
            data=PYTHON,
            optim=OptimConfig(learning_rate=3e-4, min_lr=0.0, schedule="linear", warmup_steps=100, beta2=0.98),
            train=TrainConfig(steps=2000, batch_size=8, eval_every=500, eval_windows=24, prompt="def ",
                              sample_tokens=200),
        ),
    ),
    "gpt2-style": Preset(
        "GPT-2 124M from PyTorch modules: exact GELU, and an untied head with a bias.",
        GPT2.with_model(activation="gelu", tie_embeddings=False, head_bias=True),
        options=OF_TOKENS,
    ),
    "llama-tiny": Preset(
        "A small model with Llama's block: RMSNorm, RoPE, SwiGLU, no biases, 4 query heads and 2 key/value heads.",
        Config(
            model=ModelConfig(block_size=128, n_layer=4, n_head=4, n_kv_head=2, n_embd=128, n_inner=344,
                              positions="rope", norm="rmsnorm", mlp="gated", activation="silu", bias=False),
            data=PYTHON,
            optim=ADAMW,
            train=replace(SHORT, eval_every=150, sample_tokens=200),
        ),
        "validation loss 1.49 in 4 minutes on 2 cores shared with other work",
    ),
    "finetune": Preset(
        "Fine-tune an imported or trained model on your own text or conversations (.jsonl).",
        Config(
            model=GPT2.model,  # replaced with the model of --init-from
            data=DataConfig(dataset="none", tokenizer="gpt2"),
            optim=OptimConfig(learning_rate=1e-4, min_lr=0.0, schedule="linear", warmup_steps=20, beta2=0.95),
            train=TrainConfig(steps=200, batch_size=8, eval_every=50, eval_windows=32),
        ),
        options="--init-from RUN --data.path my.txt",
    ),
    "nanogpt-cpu": Preset(
        "nanoGPT's CPU recipe, setting for setting (karpathy/nanoGPT, README, as of 2025-11).",
        Config(
            model=replace(NANOGPT, n_layer=4, n_head=4, n_embd=128, block_size=64),
            data=replace(SHAKESPEARE, sampling="random"),
            optim=NANOGPT_OPTIM,
            # nanoGPT runs steps 0 to 2000 inclusive, and evaluates on 20 batches of 12 windows.
            train=TrainConfig(steps=2001, batch_size=12, steps_per_call=10, eval_every=250, eval_windows=240,
                              eval_batch_size=64),
        ),
        "validation loss 1.90 in 2 minutes on 2 cores (nanoGPT ends at 1.898 on the complete split)",
    ),
    "nanogpt-gpu": Preset(
        "nanoGPT's GPU recipe, setting for setting (karpathy/nanoGPT, config/train_shakespeare_char.py, as of 2025-11).",
        Config(
            model=replace(NANOGPT, n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.2),
            data=replace(SHAKESPEARE, sampling="random"),
            optim=replace(NANOGPT_OPTIM, decay_steps=5000),
            train=TrainConfig(steps=5001, batch_size=64, eval_every=250, compute_dtype="bfloat16"),
        ),
        "best validation loss 1.47 near step 1,750, then it overfits (as reported by users of nanoGPT)",
    ),
    "gpt2": Preset(
        "GPT-2 124M, trained with nanoGPT's recipe for OpenWebText (config/train_gpt2.py).",
        GPT2,
        "validation loss 2.85 on OpenWebText after 600,000 steps, 4 days on 8 A100s (nanoGPT's run)",
        options=OF_TOKENS,
    ),
    "gpt2-medium": Preset("GPT-2, 355M.", GPT2.with_model(n_layer=24, n_head=16, n_embd=1024), options=OF_TOKENS),
    "gpt2-large": Preset("GPT-2, 774M.", GPT2.with_model(n_layer=36, n_head=20, n_embd=1280), options=OF_TOKENS),
    "gpt2-xl": Preset("GPT-2, 1.5B.", GPT2.with_model(n_layer=48, n_head=25, n_embd=1600), options=OF_TOKENS),
}
# fmt: on
