"""Presets: functions that return a `Config`. The docstring has a description, the command to run, and the result to expect.

The result is that of a recorded run (in docs/performance.md, or from the given source). Presets without one have no such line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig, UserError, did_you_mean

PYTHON = DataConfig(dataset="python", train_fraction=0.985)  # a small split keeps evaluation short


def python_char() -> Config:
    """A character-level model of Python's standard library; needs no download.

    Command: jaxgpt train python-char
    Expect: validation loss 1.31 in 80 seconds on 2 cores
    """
    return Config(
        model=_modern(n_layer=4, n_head=4, n_embd=128, block_size=128),
        data=PYTHON,
        optim=_muon(warmup_steps=50),
        train=TrainConfig(steps=300, batch_size=32, eval_every=100, eval_windows=96, prompt="def ", sample_tokens=400),
    )


def shakespeare() -> Config:
    """A character-level model of Shakespeare's plays, sized for a CPU.

    Command: jaxgpt train shakespeare
    Expect: validation loss 1.59 in 2.5 minutes on 2 cores
    """
    return Config(
        model=_modern(n_layer=4, n_head=4, n_embd=128, block_size=128),
        data=DataConfig(dataset="shakespeare"),
        optim=_muon(warmup_steps=50),
        train=TrainConfig(
            steps=400, batch_size=32, eval_every=100, eval_windows=96, prompt="ROMEO:", sample_tokens=400
        ),
    )


def shakespeare_fast() -> Config:
    """The loss of nanoGPT's CPU recipe in seconds: a small model with an untied head and high learning rates for Muon.

    Command: jaxgpt train shakespeare-fast
    Expect: validation loss 1.85 in 7 seconds on 2 cores, including startup and evaluation; 11 seconds the first time
    """
    model = _modern(n_layer=2, n_head=4, n_embd=64, block_size=64)
    optim = _muon(warmup_steps=5)
    return Config(
        model=replace(model, tie_embeddings=False),
        data=DataConfig(dataset="shakespeare"),
        # A momentum of 0.95 is too slow for 240 steps.
        optim=replace(optim, learning_rate=0.03, beta1=0.8, muon_learning_rate=0.06, muon_momentum=0.85, muon_steps=4),
        train=TrainConfig(
            steps=240, batch_size=24, steps_per_call=10, eval_every=240, eval_batch_size=128, prompt="ROMEO:"
        ),
    )


def statquest() -> Config:
    """StatQuest's decoder-only transformer: five words, width 2, 37 parameters. Learns to answer "awesome <EOS>".

    Command: jaxgpt train statquest
    Expect: loss 0.14 and both questions answered, in 5 seconds
    """
    return Config(
        model=ModelConfig(
            block_size=5,
            n_layer=1,
            n_head=1,
            n_embd=2,
            positions="sinusoidal",
            norm="none",
            final_norm=False,
            mlp="none",
            bias=False,
            attn_proj=False,
            tie_embeddings=False,
            head_bias=True,
            init="torch",
        ),
        data=DataConfig(dataset="statquest", tokenizer="word", train_fraction=1.0, stride=6),
        optim=OptimConfig(
            learning_rate=0.1,
            min_lr=0.1,
            schedule="constant",
            warmup_steps=0,
            beta2=0.999,
            weight_decay=0.0,
            grad_clip=0.0,
        ),
        train=TrainConfig(
            steps=60, batch_size=1, eval_every=60, log_every=1, prompt="what is statquest <EOS>", sample_tokens=2
        ),
        mesh=MeshConfig(data=1),
    )


def induction() -> Config:
    """Two layers of attention without MLPs, on random strings written twice: the loss drops when an induction head forms.

    Command: jaxgpt train induction
    Expect: validation loss 2.77 in 49 seconds of CPU time, and a head with an induction score of 0.46
    """
    return Config(
        model=replace(_modern(n_layer=2, n_head=4, n_embd=64, block_size=64), mlp="none"),
        data=DataConfig(dataset="repeats"),
        optim=_muon(warmup_steps=50),
        train=TrainConfig(
            steps=1000,
            batch_size=32,
            eval_every=500,
            checkpoint_every=50,
            keep_every=50,  # docs/induction.py scores the heads of each checkpoint
            prompt="QuickBrownFoxQuick",
            sample_tokens=8,
        ),
    )


def numpy_minimal() -> Config:
    """A minimal NumPy decoder: one head, no biases, ReLU, and post-norm that divides by (std + 1e-5).

    The original has no embedding and no head (it equals `GPT.apply(..., method="stack")`); both are added for training.

    Command: jaxgpt train numpy-minimal
    Expect: validation loss 2.18 in 36 seconds on 2 cores
    """
    return Config(
        model=ModelConfig(
            block_size=64,
            n_layer=2,
            n_head=1,
            n_embd=64,
            n_inner=128,
            positions="sinusoidal",
            norm="stdnorm",
            norm_position="post",
            norm_affine=False,
            final_norm=False,
            activation="relu",
            bias=False,
            attn_proj=False,
            init_std=0.1,
        ),
        data=PYTHON,
        optim=_adamw(warmup_steps=50),
        train=TrainConfig(
            steps=500,
            batch_size=32,
            steps_per_call=10,
            eval_every=250,
            eval_windows=96,
            prompt="def ",
            sample_tokens=200,
        ),
    )


def torch_decoder() -> Config:
    """Six post-norm layers with PyTorch's defaults: sinusoidal positions, ReLU, 8 heads, biases, width 512, context 512.

    The study notes call `TransformerDecoderLayer(x, memory=None)`, which PyTorch rejects. A decoder layer without
    cross-attention is a `TransformerEncoderLayer` with a causal mask, which is what this preset computes.

    Command: jaxgpt train torch-decoder
    """
    return Config(
        model=ModelConfig(
            block_size=512,
            n_layer=6,
            n_head=8,
            n_embd=512,
            positions="sinusoidal",
            norm_position="post",
            activation="relu",
            tie_embeddings=False,
            head_bias=True,
            dropout=0.1,
        ),
        data=PYTHON,
        optim=OptimConfig(learning_rate=3e-4, min_lr=0.0, schedule="linear", warmup_steps=100, beta2=0.98),
        train=TrainConfig(steps=2000, batch_size=8, eval_every=500, eval_windows=24, prompt="def ", sample_tokens=200),
    )


def gpt2_style() -> Config:
    """GPT-2 124M from PyTorch modules: exact GELU, and an untied head with a bias.

    Command: jaxgpt train gpt2-style --data.path FOLDER_OF_BIN_FILES
    """
    return _gpt2(12, 12, 768).with_model(activation="gelu", tie_embeddings=False, head_bias=True)


def llama_tiny() -> Config:
    """A small model with Llama's block: RMSNorm, RoPE, SwiGLU, no biases, 4 query heads and 2 key/value heads.

    Command: jaxgpt train llama-tiny
    Expect: validation loss 1.49 in 4 minutes on 2 cores shared with other work
    """
    return Config(
        model=ModelConfig(
            block_size=128,
            n_layer=4,
            n_head=4,
            n_kv_head=2,
            n_embd=128,
            n_inner=344,
            positions="rope",
            norm="rmsnorm",
            mlp="gated",
            activation="silu",
            bias=False,
        ),
        data=PYTHON,
        optim=_adamw(warmup_steps=50),
        train=TrainConfig(steps=300, batch_size=32, eval_every=150, eval_windows=96, prompt="def ", sample_tokens=200),
    )


def finetune() -> Config:
    """Fine-tune an imported or trained model on your own text or conversations (.jsonl).

    `jaxgpt eval RUN --data.path my.txt` prints the loss before fine-tuning.

    Command: jaxgpt train finetune --init-from RUN --data.path my.txt
    """
    return Config(
        model=_gpt2(12, 12, 768).model,  # replaced by the model of --init-from
        data=DataConfig(dataset="none", tokenizer="gpt2"),
        optim=OptimConfig(learning_rate=1e-4, min_lr=0.0, schedule="linear", warmup_steps=20, beta2=0.95),
        train=TrainConfig(steps=200, batch_size=8, eval_every=50, eval_windows=32),
    )


def nanogpt_cpu() -> Config:
    """nanoGPT's CPU recipe, setting for setting (karpathy/nanoGPT, README, as of 2025-11).

    Command: jaxgpt train nanogpt-cpu
    Expect: validation loss 1.90 in 2 minutes on 2 cores (nanoGPT ends at 1.898 on the whole split)
    """
    return Config(
        model=_nanogpt(n_layer=4, n_head=4, n_embd=128, block_size=64, dropout=0.0),
        data=DataConfig(dataset="shakespeare", sampling="random"),
        optim=_nanogpt_optim(decay_steps=2000),
        # Steps 0 to 2000, both included, as nanoGPT counts; 240 windows are its 20 batches.
        train=TrainConfig(
            steps=2001,
            batch_size=12,
            steps_per_call=10,
            eval_every=250,
            eval_windows=240,
            eval_batch_size=64,
            prompt="\n",
        ),
    )


def nanogpt_gpu() -> Config:
    """nanoGPT's GPU recipe, setting for setting (karpathy/nanoGPT, config/train_shakespeare_char.py, as of 2025-11).

    Command: jaxgpt train nanogpt-gpu
    Expect: best validation loss 1.47 near step 1,750, then it overfits (as reported by users of nanoGPT)
    """
    return Config(
        model=_nanogpt(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.2),
        data=DataConfig(dataset="shakespeare", sampling="random"),
        optim=_nanogpt_optim(decay_steps=5000),
        train=TrainConfig(steps=5001, batch_size=64, eval_every=250, compute_dtype="bfloat16", prompt="\n"),
    )


def gpt2() -> Config:
    """GPT-2 124M, trained with nanoGPT's recipe for OpenWebText (config/train_gpt2.py).

    Command: jaxgpt train gpt2 --data.path FOLDER_OF_BIN_FILES
    Expect: validation loss 2.85 on OpenWebText after 600,000 steps, 4 days on 8 A100 (nanoGPT's run)
    """
    return _gpt2(12, 12, 768)


def gpt2_medium() -> Config:
    """GPT-2, 355M.

    Command: jaxgpt train gpt2-medium --data.path FOLDER_OF_BIN_FILES
    """
    return _gpt2(24, 16, 1024)


def gpt2_large() -> Config:
    """GPT-2, 774M.

    Command: jaxgpt train gpt2-large --data.path FOLDER_OF_BIN_FILES
    """
    return _gpt2(36, 20, 1280)


def gpt2_xl() -> Config:
    """GPT-2, 1.5B.

    Command: jaxgpt train gpt2-xl --data.path FOLDER_OF_BIN_FILES
    """
    return _gpt2(48, 25, 1600)


DEFAULT = "python-char"
_FUNCTIONS: tuple[Callable[[], Config], ...] = (
    python_char,
    shakespeare,
    shakespeare_fast,
    statquest,
    induction,
    numpy_minimal,
    torch_decoder,
    gpt2_style,
    llama_tiny,
    finetune,
    nanogpt_cpu,
    nanogpt_gpu,
    gpt2,
    gpt2_medium,
    gpt2_large,
    gpt2_xl,
)
PRESETS: dict[str, Callable[[], Config]] = {f.__name__.replace("_", "-"): f for f in _FUNCTIONS}


def preset(name: str) -> Config:
    """Return the config of a preset.

    Raises:
        UserError: there is no preset of that name.
    """
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(f"no preset {name!r}{did_you_mean(name, PRESETS)}: one of {known}")
    return replace(PRESETS[name](), preset=name)


class Description(NamedTuple):
    """The parts of a preset's docstring.

    Attributes:
        what: description in one sentence.
        command: command that trains the preset.
        expect: result of a recorded run, or None.
    """

    what: str
    command: str
    expect: str | None


def describe(name: str) -> Description:
    """Parse the docstring of a preset. `python -OO` removes docstrings."""
    what, *lines = [line.strip() for line in (PRESETS[name].__doc__ or "").strip().splitlines()] or [""]
    labelled = dict(line.split(": ", 1) for line in lines if ": " in line)
    return Description(what, labelled.get("Command", f"jaxgpt train {name}"), labelled.get("Expect"))


def _modern(*, n_layer: int, n_head: int, n_embd: int, block_size: int) -> ModelConfig:
    """Our recipe for small models: RoPE, RMSNorm, QK-norm, squared ReLU, no biases."""
    return ModelConfig(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        block_size=block_size,
        positions="rope",
        norm="rmsnorm",
        qk_norm=True,
        activation="relu2",
        bias=False,
        init="zero-proj",
        # No effect in training. Beyond the context, it limits attention to distances seen in training.
        sliding_window=block_size,
    )


def _muon(*, warmup_steps: int) -> OptimConfig:
    """Muon for the matrices of the blocks, AdamW for the rest, with linear decay to zero."""
    return OptimConfig(
        name="muon",
        learning_rate=4e-3,
        min_lr=0.0,
        schedule="linear",
        warmup_steps=warmup_steps,
        beta2=0.95,
        weight_decay=0.0,
    )


def _adamw(*, warmup_steps: int) -> OptimConfig:
    """AdamW with linear decay to zero."""
    return OptimConfig(
        learning_rate=3e-3, min_lr=0.0, schedule="linear", warmup_steps=warmup_steps, beta2=0.95, weight_decay=0.1
    )


def _nanogpt(*, n_layer: int, n_head: int, n_embd: int, block_size: int, dropout: float) -> ModelConfig:
    return ModelConfig(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        block_size=block_size,
        activation="gelu",
        bias=False,
        dropout=dropout,
    )


def _nanogpt_optim(*, decay_steps: int) -> OptimConfig:
    return OptimConfig(
        learning_rate=1e-3,
        min_lr=1e-4,
        schedule="cosine",
        warmup_steps=100,
        decay_steps=decay_steps,
        beta2=0.99,
        weight_decay=0.1,
        grad_clip=1.0,
    )


def _gpt2(n_layer: int, n_head: int, n_embd: int) -> Config:
    """nanoGPT's recipe: 480 windows of 1,024 tokens per step (491,520 tokens), in microbatches of 12 per device."""
    return Config(
        model=ModelConfig(vocab_size=50257, block_size=1024, n_layer=n_layer, n_head=n_head, n_embd=n_embd),
        data=DataConfig(dataset="none", tokenizer="gpt2", sampling="random"),
        optim=OptimConfig(
            learning_rate=6e-4,
            min_lr=6e-5,
            schedule="cosine",
            warmup_steps=2000,
            decay_steps=600_000,
            beta2=0.95,
            weight_decay=0.1,
            grad_clip=1.0,
        ),
        train=TrainConfig(
            steps=600_001, batch_size=480, microbatch=12, eval_every=1000, compute_dtype="bfloat16", prompt="\n"
        ),
    )
