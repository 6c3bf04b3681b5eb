"""Generation on meshes, in one or several processes: equal texts, and no device with more than its share of the weights."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from texts_in_processes import texts

from jaxgpt.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.lm import LM, engine, generate, score, score_batch
from jaxgpt.lm.mesh_part import one_copy, part_length
from jaxgpt.parallel.rules import AXES
from jaxgpt.trainer.build import build


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare JSON values; numbers may differ by rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value, f"{where} {name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b, where)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5), where
    else:
        assert found == expected, where


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The texts of one device."""
    return json.loads(json.dumps(texts({"data": 1})))


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "devices", "mesh"),
    [
        (2, 1, {"data": 2}),
        (2, 1, {"fsdp": 2}),
        (2, 1, {"tensor": 2}),
        (2, 2, {"data": 2, "fsdp": 2}),
        (2, 2, {"fsdp": 2, "tensor": 2}),
        (4, 1, {"data": 4}),
        (4, 1, {"fsdp": 4}),
        (4, 1, {"tensor": 4}),
        (4, 1, {"data": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_several_processes_generate_the_texts_of_one(
    processes: int, devices: int, mesh: dict[str, int], expected: dict[str, Any]
) -> None:
    """The texts are drawn, most probable, searched, sliding, looked up, streamed, scored, or answers of a chat."""
    script = str(Path(__file__).with_name("texts_in_processes.py"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for index in range(processes):
        command = [
            sys.executable,
            script,
            str(port),
            str(index),
            str(processes),
            str(devices),
            json.dumps({"data": 1} | mesh),
        ]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        ends = [process.communicate(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()  # after a timeout; otherwise, it has ended
    assert [process.returncode for process in started] == [0] * processes, ends
    for out, _ in ends:
        [found] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]  # gloo prints lines, too
        assert_equal(found, expected)


def test_a_part_of_a_mesh_is_the_fewest_complete_processes() -> None:
    def length(*process: list[int]) -> int:
        return part_length(np.array(process))

    assert length([0], [1], [2], [3]) == 1
    assert length([0], [0], [1], [1]) == 2, "two devices of each process"
    assert length([0, 0], [1, 1]) == 1
    assert length([0, 1], [2, 3]) == 1, "two processes hold the weights together"
    assert length([0, 1, 2, 3]) == 1
    assert length([0], [1], [0], [1]) == 4, "no part has complete processes"


@pytest.mark.parametrize("axes", [AXES, AXES[::-1]], ids=["data first", "data last"])
def test_a_copy_of_the_weights_is_found_in_a_mesh_of_any_order(axes: tuple[str, ...]) -> None:
    sizes = {"data": 2, "tensor": 2}
    devices = np.array(jax.devices()[:4]).reshape([sizes.get(axis, 1) for axis in axes])
    x_VD = np.arange(12, dtype=np.float32).reshape(6, 2)
    sharded = jax.device_put(x_VD, NamedSharding(Mesh(devices, axes), PartitionSpec("tensor")))

    copy = one_copy(LM(Config(), {"x": sharded}, CharTokenizer("a")))
    assert len(copy.params["x"].sharding.device_set) == 2
    assert copy.params["x"].sharding.mesh.axis_names == axes
    np.testing.assert_array_equal(copy.params["x"], x_VD)


# The largest arrays are the matrices of the MLP.
MODEL = ModelConfig(vocab_size=64, block_size=64, n_layer=2, n_head=8, n_embd=128, n_inner=1024, positions="rope")
LARGEST = 128 * 1024 * 4


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"fsdp": 8}, marks=pytest.mark.ci),
        pytest.param({"tensor": 8}, marks=pytest.mark.long),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_no_device_holds_more_than_its_share_and_the_largest_array(
    mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device holds its shards of the weights and the cache, and the temporary arrays of a program."""
    program = build(Config(model=MODEL, train=TrainConfig(batch_size=8), mesh=MeshConfig(**{"data": 1} | mesh)))
    lm = LM(program.config, program.init().params, CharTokenizer([chr(48 + i) for i in range(64)]))
    share = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(lm.params))
    beyond = dict[str, int]()

    def measured(compiled: Any, name: str) -> Any:
        def call(*args: Any) -> Any:
            memory = compiled.lower(*args).compile().memory_analysis()
            beyond[name] = memory.temp_size_in_bytes + memory.argument_size_in_bytes - share
            return compiled(*args)

        return call

    jitted = engine.jitted
    monkeypatch.setattr(engine, "jitted", lambda f, *args, **kw: measured(jitted(f, *args, **kw), f.__name__))
    of_scores = score_batch._compiled
    monkeypatch.setattr(score_batch, "_compiled", lambda *args: measured(of_scores(*args), "score"))
    generate(lm, [[1, 2, 3]] * 8, max_new_tokens=16, key=0)
    score(lm, [[1, 2, 3]] * 8, [[4, 5]] * 8)

    cache = 2 * MODEL.n_layer * 8 * (9 + 64) * MODEL.n_embd * 4 / 8
    for name, size in beyond.items():
        assert size < cache + LARGEST, name
    assert set(beyond) == {"prefill", "decode_steps", "score"}
