"""A step on any mesh, with any sharding rules, chunks, microbatches, scan and remat, equals the step on one device."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from helpers import random_ids, small
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from jaxgpt.config import Config, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.model.scan import unstack_layers
from jaxgpt.trainer.build import build

T = 16
SIZES = itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4))  # data, fsdp, tensor
MESHES = [sizes for sizes in SIZES if 1 < math.prod(sizes) <= 8]
RULES: dict[str, Any] = {
    "": {},
    "length": {"length": ("tensor",)},
    "data": {"embed": ("data",)},  # divides weights on a mesh of "data" alone as well
    "heads": {"heads": (), "kv_heads": ()},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("gpt2", {"tie_embeddings": False, "bias": False}),
    "tied": ("gpt2", {}),
    "llama": ("llama", {"n_kv_head": 1}),
    "statquest": ("statquest", {}),  # neither norms nor MLPs
}
DRAWS = st.tuples(
    st.sampled_from([*MODELS]),
    st.sampled_from([4, 7]),  # rows
    st.sampled_from(MESHES),
    st.sampled_from([*RULES]),
    st.sampled_from([0, 3, 8, 40]),  # train.loss_chunk
    st.sampled_from([1, 2, 4]),  # train.accumulation
    st.booleans(),  # train.scan_layers
    st.sampled_from(["none", "dots", "full", "offload"]),
    st.sampled_from([0.0, 0.2]),  # model.dropout
)

# The mesh divided the operand of a transposition, which XLA compiled as a separate call.
NOT_COMPILED = ("untied", 4, (1, 4, 2), "length", 3, 1, False, "none", 0.0)


def step(
    model: str,
    rows: int,
    mesh: tuple[int, int, int] = (1, 1, 1),
    rules: str = "",
    chunk: int = 0,
    accumulation: int = 1,
    scan_layers: bool = False,
    remat: Any = "none",
    dropout: float = 0.0,
    layers: int = 1,
) -> Any:
    """Return loss, gradient norm and new weights of one step of SGD. Each microbatch draws its own dropout masks."""
    name, changes = MODELS[model]
    shape = {
        "vocab_size": 33,
        "n_layer": layers,
        "block_size": T,
        "n_head": 4,
        "n_embd": 16,
        "dropout": dropout,
    }
    data, fsdp, tensor = mesh
    config = Config(
        model=small(name, **(shape | changes)),
        optim=OptimConfig(name="sgd", learning_rate=0.1, warmup_steps=0),
        train=TrainConfig(
            batch_size=rows,
            steps=1,
            loss_chunk=chunk,
            accumulation=1 if dropout else accumulation,
            scan_layers=scan_layers,
            remat=remat,
        ),
        mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor),
    )

    program = build(config, rules=RULES[rules])
    windows = np.array(random_ids(config.model, (rows, T + 1)))
    windows[1, 5:] = -1  # rows and microbatches have different numbers of targets
    state, metrics = program.step(program.init(), program.put(windows))
    params = unstack_layers(state.params, layers) if scan_layers else state.params
    return jax.device_get((metrics["loss"], metrics["grad_norm"], params))


alone = functools.cache(step)


@pytest.mark.parametrize("draws", [0, pytest.param(12, marks=pytest.mark.long)])
def test_one_step_equals_that_of_one_device(draws: int) -> None:
    phases = [Phase.explicit, Phase.generate] if draws else [Phase.explicit]

    @settings(max_examples=max(draws, 1), phases=phases)
    @example(NOT_COMPILED)
    @given(DRAWS)
    def check(draw: Any) -> None:
        model, rows, *_, scan_layers, _, dropout = draw
        layers = 2 if scan_layers else 1
        found = step(*draw, layers)
        expected = alone(model, rows, dropout=dropout, layers=layers)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6), found, expected)

    check()
