"""The choice of operations for a config and its devices, and its messages."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from helpers import small
from jax.sharding import AbstractMesh

from jaxgpt.config import Config, DataConfig, MeshConfig, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.kernels import CONTEXT_KERNELS, CPU, GPU, KERNELS, MOST_GATHERED, PLAIN, best, choose_attention, of_device
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import attend
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.trainer.build import build, check_remat

DEVICE = SimpleNamespace(platform="cpu")
TPU = SimpleNamespace(platform="tpu")
AMD = SimpleNamespace(platform="gpu", compute_capability="gfx942")
TURING, AMPERE, HOPPER = (SimpleNamespace(platform="gpu", compute_capability=c) for c in ("7.5", "8.0", "9.0"))


def config(attention: str = "auto", dtype: str = "bfloat16", **model: Any) -> Config:
    return Config(
        model=small("gpt2", **({"head_dim": 64, "block_size": 128} | model)),
        train=TrainConfig(attention=attention, compute_dtype=dtype),  # type: ignore[arg-type]
    )


def context_config(attention: str = "auto", **model: Any) -> Config:
    return replace(config(attention, **model), mesh=MeshConfig(context=4))


@pytest.mark.parametrize(
    ("made", "device", "kernel", "said"),
    [
        (config(block_size=64, dropout=0.1), DEVICE, None, ""),
        (config(), DEVICE, "tiled", ""),
        (config(dropout=0.1), DEVICE, None, "tiled does not support dropout"),
        (config("tiled"), DEVICE, "tiled", ""),
        (config("xla"), DEVICE, None, ""),
        (config(), AMD, None, "needs an NVIDIA GPU"),
        (config(), HOPPER, "cudnn", ""),
        (config(head_dim=256), HOPPER, "cudnn", ""),
        (config(head_dim=256), AMPERE, None, "up to 128, not 256"),
        (config(head_dim=20), AMPERE, None, "a multiple of 8"),
        (config(block_size=129), HOPPER, None, "an even window, not model.block_size 129"),
        (
            replace(config(block_size=256), data=DataConfig(window=255)),
            HOPPER,
            None,
            "an even window, not data.window 255",
        ),
        (
            replace(config(dropout=0.1), data=DataConfig(window=64)),
            DEVICE,
            None,
            "",
        ),  # the scores of short windows are small
        (replace(config(n_kv_head=1), mesh=MeshConfig(tensor=2)), HOPPER, "cudnn", ""),
        (replace(config(), mesh=MeshConfig(tensor=2)), HOPPER, "cudnn", ""),
        (config(), TURING, None, "compute capability 8.0"),
        (config(dtype="float32"), HOPPER, None, "needs train.compute_dtype bfloat16"),
        (config(dropout=0.1), HOPPER, None, "model.dropout 0.1"),
        (config("xla"), HOPPER, None, ""),
        (replace(config(), data=DataConfig(documents="mask")), HOPPER, None, "cudnn does not support documents"),
        (replace(config(), data=DataConfig(path="a.jsonl")), TPU, "splash", ""),
        (config(dtype="float32"), TPU, "splash", ""),
        (config(dropout=0.1), TPU, None, "splash does not support dropout"),
        (context_config(), DEVICE, "gathered", ""),
        (context_config(block_size=MOST_GATHERED), HOPPER, "gathered", ""),
        (context_config(block_size=2 * MOST_GATHERED), TPU, "ring", ""),
        (context_config(block_size=2 * MOST_GATHERED, sliding_window=1024), HOPPER, "halo", ""),
        (context_config(block_size=2 * MOST_GATHERED, sliding_window=1024), TPU, "splash", ""),
        (context_config(block_size=1024), TPU, "splash", ""),
        (context_config(block_size=1024, sliding_window=258), DEVICE, "gathered", ""),
        (context_config(block_size=1024, sliding_window=257), DEVICE, "halo", ""),
        (context_config(block_size=1024, sliding_window=8, window_pattern="LG"), DEVICE, "gathered", ""),
        (context_config("ring"), TPU, "ring", ""),
        (context_config("xla"), TPU, None, ""),
        (context_config(dropout=0.1), TPU, None, "gathered does not support dropout (model.dropout 0.1)"),
    ],
)
def test_the_kernel_of_a_device(made: Config, device: Any, kernel: str | None, said: str) -> None:
    found, note = choose_attention(made, device)
    kernels = CONTEXT_KERNELS if made.mesh.context > 1 else dict(KERNELS.values())
    assert found is (kernels[kernel] if kernel else attend)
    assert said in note
    assert bool(note) == bool(said)


@pytest.mark.parametrize(
    ("made", "device", "message"),
    [
        (config("cudnn"), DEVICE, "train.attention cudnn does not run on cpu devices"),
        (config("tiled"), HOPPER, "train.attention tiled does not run on gpu devices"),
        (config("splash"), HOPPER, "train.attention splash does not run on gpu devices"),
        (config("cudnn", "float32"), HOPPER, "cudnn needs train.compute_dtype bfloat16; use --train.attention xla"),
        (config("ring"), TPU, r"ring needs positions that are divided over devices \(mesh.context 2 or more\); use"),
        (
            context_config("cudnn"),
            HOPPER,
            r"cudnn needs complete windows on each device \(mesh.context 1, not 4\); use",
        ),
        (context_config("splash"), HOPPER, "splash does not run on gpu devices; use"),
        (
            context_config("splash"),
            TPU,
            "splash needs a window that is a multiple of 1024, not model.block_size 128; use",
        ),
        (
            context_config("halo", sliding_window=34),
            TPU,
            r"of 2 to 33 tokens with mesh.context 4; use",
        ),
        (context_config("ring", dropout=0.1), TPU, r"ring does not support dropout \(model.dropout 0.1\); use"),
    ],
)
def test_a_kernel_that_cannot_run_raises(made: Config, device: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_attention(made, device)


def changed(ops: Ops, other: Ops) -> set[str]:
    return {name for name in Ops._fields if getattr(ops, name) != getattr(other, name)}


def test_operations_of_a_mesh() -> None:
    made = config(dtype="float32")
    for mesh in (None, make_mesh(MeshConfig(data=2)), make_mesh(MeshConfig(data=2, tensor=2))):
        assert best(made, mesh) == CPU
    for device, operations in ((TPU, PLAIN), (HOPPER, GPU), (AMD, GPU)):
        assert of_device(device, "float32") == operations  # type: ignore[arg-type]
    assert best(config(), make_mesh(MeshConfig(data=2))).dtype == jnp.bfloat16
    assert changed(best(config(), AbstractMesh((2,), ("data",))), PLAIN) == {"dtype"}


def test_offload_needs_host_memory_of_the_platform() -> None:
    build(Config(model=small("gpt2"), train=TrainConfig(remat="offload")))
    device: Any = SimpleNamespace(platform="cpu", addressable_memories=lambda: [])
    with pytest.raises(
        UserError,
        match=r"train\.remat offload needs pinned host memory, which cpu devices lack: use --train\.remat dots",
    ):
        check_remat("offload", device)


def test_dropout_needs_the_attention_of_the_definition() -> None:
    with pytest.raises(UserError, match=r"model\.dropout 0\.1 needs the attention of Ops\(\)"):
        build(config(dropout=0.1), ops=CPU)
    assert build(config(dropout=0.1), ops=Ops(norm=CPU.norm)).model.ops.norm is CPU.norm
