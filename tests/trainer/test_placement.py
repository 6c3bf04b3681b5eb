"""Weights are read where they belong: no device holds more than its shards and one more array."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from folders import LLAMA, TEXT, run_folder
from helpers import flags, jaxgpt

import jaxgpt as api
from jaxgpt.config import MeshConfig
from jaxgpt.lm.source import Source, checksum
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.trainer.states import States

# The largest arrays are the matrices of the MLP. Eight devices do not divide the 27 ids.
MODEL = replace(LLAMA, n_layer=4, n_embd=64, n_head=8, n_kv_head=8, n_inner=256, tie_embeddings=False)
LARGEST = 64 * 256 * 4
REPLICATED = 20_000  # maximum bytes of the arrays that every device holds, such as gains and counters


class Peak:
    """The maximum number of bytes that a device holds, beyond those at the start."""

    def __init__(self) -> None:
        gc.collect()
        self.before = held()
        self.bytes = 0

    def sample(self) -> None:
        now = held()
        self.bytes = max([self.bytes, *(size - self.before[device] for device, size in now.items())])


def held() -> Counter[Any]:
    """Return the bytes of the live arrays on each device, computed from their shardings."""
    found: Counter[Any] = Counter()
    for array in jax.live_arrays():
        if array.is_deleted():
            continue
        size = int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
        for device in array.sharding.device_set:
            found[device] += size
    return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Peak]:
    """Return a function that starts to measure while weights are read and a state is made, but not while it is trained."""
    peaks: list[Peak] = []

    @contextmanager
    def sampling() -> Iterator[None]:
        stop = threading.Event()

        def sample() -> None:
            while not stop.wait(0.001):
                peaks[-1].sample()

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def measured(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not peaks:
                return function(*args, **kwargs)
            with sampling():
                out = function(*args, **kwargs)
            peaks[-1].sample()
            return out

        return call

    for target, name in (
        (Source, "read"),
        (Source, "read_frozen"),
        (States, "init"),
        (States, "restore"),
        (States, "put_base"),
    ):
        monkeypatch.setattr(target, name, measured(getattr(target, name)))

    def start() -> Peak:
        peaks.append(Peak())
        return peaks[-1]

    return start


def size(params: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of random weights; do not modify."""
    return run_folder(tmp_path_factory.mktemp("placement") / "base", MODEL)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(**({"data": 1} | axes)))


def test_a_model_is_read_onto_a_mesh(base: Path, watch: Callable[[], Peak]) -> None:
    expected = jax.tree.map(np.asarray, api.load(base).params)
    peak = watch()
    lm = api.load(base, mesh=mesh_of(fsdp=8))
    assert peak.bytes < size(expected) / 8 + LARGEST + REPLICATED
    jax.tree.map(np.testing.assert_array_equal, lm.params, expected)
    kernel = lm.params["h_0"]["mlp"]["up_proj"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (8, 256)
    assert checksum(lm.params) == checksum(expected)


RUN = flags(
    data__path="text.txt",
    data__window=8,
    train__steps=2,
    train__batch_size=8,
    train__eval_every=2,
    train__sample_tokens=0,
    mesh__data=1,
    mesh__fsdp=8,
)


@pytest.mark.parametrize(
    ("words", "arrays"),
    [
        ([], 3),  # weights and two moments of AdamW
        pytest.param(["--train.scan-layers"], 3, marks=pytest.mark.ci),
        (["--lora.rank", "2"], 1),
        pytest.param(["--lora.rank", "2", "--train.scan-layers"], 1, marks=pytest.mark.ci),
    ],
    ids=["all", "scan", "lora", "lora-scan"],
)
def test_a_run_starts_and_resumes_with_the_shards_of_each_device(
    base: Path, watch: Callable[[], Peak], words: list[str], arrays: int
) -> None:
    Path("text.txt").write_text(TEXT * 40)
    largest = LARGEST * (MODEL.n_layer if "--train.scan-layers" in words else 1)
    most = arrays * 4 * MODEL.parameters / 8 + largest + arrays * REPLICATED
    peak = watch()
    result = jaxgpt("train", "finetune", "--init-from", str(base), *RUN, *words, "--out", "run")
    assert result.code == 0, result.err
    assert 0 < peak.bytes < most
    peak = watch()
    result = jaxgpt("train", "--resume", "--out", "run", "--train.steps", "3")
    assert result.code == 0, result.err
    assert 0 < peak.bytes < most
