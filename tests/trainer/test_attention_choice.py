"""The choice of attention kernel, and its messages."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import small

from jaxgpt.config import Config, DataConfig, MeshConfig, TrainConfig, UserError
from jaxgpt.ops.flash import cudnn_attention, splash_attention
from jaxgpt.ops.tiled import tiled_attention
from jaxgpt.trainer.attention_choice import choose_attention
from jaxgpt.trainer.program import build

CPU = SimpleNamespace(platform="cpu")
TPU = SimpleNamespace(platform="tpu")
AMD = SimpleNamespace(platform="gpu", compute_capability="gfx942")
TURING, AMPERE, HOPPER = (SimpleNamespace(platform="gpu", compute_capability=c) for c in ("7.5", "8.0", "9.0"))


def config(attention: str = "auto", dtype: str = "bfloat16", **model: Any) -> Config:
    return Config(
        model=small("gpt2", **({"head_dim": 64} | model)),
        train=TrainConfig(attention=attention, compute_dtype=dtype),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("made", "device", "kernel", "said"),
    [
        (config(), CPU, None, ""),
        (config(block_size=128), CPU, tiled_attention, ""),
        (config(block_size=128, dropout=0.1), CPU, None, "tiled does not support dropout"),
        (config("tiled"), CPU, tiled_attention, ""),
        (config("xla", block_size=128), CPU, None, ""),
        (config(), AMD, None, ""),
        (config(), HOPPER, cudnn_attention, ""),
        (config(head_dim=256), HOPPER, cudnn_attention, ""),
        (config(head_dim=256), AMPERE, None, "up to 128, not 256"),
        (config(head_dim=20), AMPERE, None, "a multiple of 8"),
        (config(block_size=127), HOPPER, None, "an even model.block_size, not 127"),
        (replace(config(n_kv_head=1), mesh=MeshConfig(tensor=2)), HOPPER, cudnn_attention, ""),
        (replace(config(), mesh=MeshConfig(tensor=2)), HOPPER, cudnn_attention, ""),
        (config(), TURING, None, "compute capability 8.0, not 7.5"),
        (config(dtype="float32"), HOPPER, None, "needs train.compute_dtype bfloat16"),
        (config(dropout=0.1), HOPPER, None, "model.dropout 0.1"),
        (config("xla"), HOPPER, None, ""),
        (replace(config(), data=DataConfig(documents="mask")), HOPPER, None, "cudnn does not support documents"),
        (replace(config(), data=DataConfig(path="a.jsonl")), TPU, splash_attention, ""),
        (config(dtype="float32"), TPU, splash_attention, ""),
        (config(dropout=0.1), TPU, None, "splash does not support dropout"),
    ],
)
def test_the_kernel_of_a_device(made: Config, device: Any, kernel: Any, said: str) -> None:
    found, note = choose_attention(made, device)
    assert found is kernel
    assert said in note
    assert bool(note) == bool(said)


@pytest.mark.parametrize(
    ("made", "device", "message"),
    [
        (config("cudnn"), CPU, "train.attention cudnn does not run on cpu devices"),
        (config("tiled"), HOPPER, "train.attention tiled does not run on gpu devices"),
        (config("splash"), HOPPER, "train.attention splash does not run on gpu devices"),
        (config("cudnn", "float32"), HOPPER, "cudnn needs train.compute_dtype bfloat16; use xla"),
    ],
)
def test_a_kernel_that_cannot_run_raises(made: Config, device: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_attention(made, device)


def test_offload_needs_host_memory_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Config(model=small("gpt2"), train=TrainConfig(remat="offload"))
    build(made)
    monkeypatch.setattr("jaxgpt.trainer.program.has_host_memory", lambda device: False)
    with pytest.raises(
        UserError, match=r"train\.remat offload needs memory of the host that cpu devices reach: use dots"
    ):
        build(made)
