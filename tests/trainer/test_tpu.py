"""The train step compiled for TPUs without having one: the attention kernel fits its tiles and stores no scores.

Needs libtpu (`pip install 'jax[tpu]'`, or TPU_LIBRARY_PATH). One process can use it at a time.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxgpt.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.parallel.rules import AXES
from jaxgpt.trainer.build import make_program

LAYERS, HEADS = 2, 4
B, T = 64, 1024  # the scores of a device exceed its on-chip memory, which the memory analysis does not count
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (importlib.util.find_spec("libtpu") or "TPU_LIBRARY_PATH" in os.environ), reason="libtpu is not installed"
    ),
]


def compiled(window: int = 0, **train: Any) -> Any:
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)
    config = Config(
        model=ModelConfig(
            vocab_size=512,
            block_size=T,
            n_layer=LAYERS,
            n_head=HEADS,
            n_kv_head=2,
            n_embd=256,
            positions="rope",
            sliding_window=window,
        ),
        train=TrainConfig(**({"batch_size": B, "compute_dtype": "bfloat16"} | train)),
        mesh=MeshConfig(data=2, fsdp=1, tensor=2),
    )
    p = make_program(config, Mesh(devices.reshape(2, 1, 2), AXES, axis_types=(AxisType.Auto,) * 3))
    return p.lower(p.abstract.state, p.batches.abstract()).compile()


@pytest.mark.parametrize(("scan_layers", "window"), [(False, 0), (True, 0), (False, 256)])
def test_splash_attention_never_stores_t_x_t_scores(scan_layers: bool, window: int) -> None:
    scores = re.compile(rf"\[(\d+,)*{T},{T}\]")
    flash, plain = (compiled(window, attention=kernel, scan_layers=scan_layers) for kernel in ("auto", "xla"))
    assert "tpu_custom_call" in flash.as_text()
    assert not scores.search(flash.as_text())
    assert scores.search(plain.as_text())
    # The reference saves the attention weights of every layer for the backward pass, at least in bfloat16.
    kept = LAYERS * (B // 2) * (HEADS // 2) * T * T * 2
    assert plain.memory_analysis().temp_size_in_bytes - flash.memory_analysis().temp_size_in_bytes > kept
