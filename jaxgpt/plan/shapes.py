"""Published architectures, for plans: sizes without a recipe, data or weights."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig


class Shape(NamedTuple):
    """The sizes of a published model.

    Attributes:
        model: the architecture; `block_size` is the window of a plan, not the longest context.
        parameters: published number of parameters, to check the architecture.
        source: publication of the model.
    """

    model: ModelConfig
    parameters: int
    source: str


# Settings of all these architectures, with the sizes of Llama 3 8B.
# Sources of the sizes: config.json of meta-llama/Llama-3.2-1B, Llama-2-7b-hf, Meta-Llama-3-8B, Meta-Llama-3-70B and
# mistralai/Mixtral-8x7B-v0.1.
LLAMA_8B = ModelConfig(
    positions="rope",
    rope_theta=500_000.0,
    norm="rmsnorm",
    mlp="gated",
    activation="silu",
    bias=False,
    tie_embeddings=False,
    block_size=8192,
    vocab_size=128_256,
    n_layer=32,
    n_embd=4096,
    n_head=32,
    n_kv_head=8,
    n_inner=14336,
)

SHAPES = {
    "llama-3.2-1b": Shape(
        model=replace(LLAMA_8B, n_layer=16, n_embd=2048, n_inner=8192, tie_embeddings=True),
        parameters=1_235_814_400,
        source="Llama 3.2 1B (Meta 2024)",
    ),
    "llama-2-7b": Shape(
        model=replace(LLAMA_8B, rope_theta=10_000.0, block_size=4096, vocab_size=32_000, n_kv_head=32, n_inner=11008),
        parameters=6_738_415_616,
        source="Touvron et al. 2023",
    ),
    "llama-3-8b": Shape(
        model=LLAMA_8B,
        parameters=8_030_261_248,
        source="Grattafiori et al. 2024",
    ),
    "llama-3-70b": Shape(
        model=replace(LLAMA_8B, n_layer=80, n_embd=8192, n_head=64, n_inner=28672),
        parameters=70_553_706_496,
        source="Grattafiori et al. 2024",
    ),
    "mixtral-8x7b": Shape(
        model=replace(LLAMA_8B, rope_theta=1_000_000.0, vocab_size=32_000, n_experts=8, experts_per_token=2),
        parameters=46_702_792_704,
        source="Jiang et al. 2024",
    ),
}


def shape_config(name: str) -> Config:
    """Return the settings of a plan for a shape.

    Published shapes have no recipe. The plan has common choices: AdamW, 64 windows per step, bfloat16, and rematerialization
    of all operations except matrix products and attention kernels (`dots`).
    """
    return Config(
        model=SHAPES[name].model,
        data=DataConfig(dataset="none", tokenizer="gpt2"),
        train=TrainConfig(batch_size=64, compute_dtype="bfloat16", remat="dots"),
    )
