"""Weights are read where they belong: no device holds more than its shards and one more array."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest
from convert.test_adapters import lora_run
from folders import LLAMA, TEXT, run_folder
from helpers import flags, jaxgpt

import jaxgpt as api
from jaxgpt.checkpoint.placement import Place
from jaxgpt.checkpoint.source import WeightSource, checksum, open_source
from jaxgpt.config import LoraConfig, MeshConfig
from jaxgpt.errors import UserError
from jaxgpt.model.params import count_parameters
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.trainer import build
from jaxgpt.trainer.program import Program

# The largest arrays are the matrices of the MLP. Eight devices do not divide the 27 ids.
MODEL = replace(LLAMA, n_layer=2, n_embd=64, n_head=8, n_kv_head=8, n_inner=256, tie_embeddings=False)
LARGEST = 64 * 256 * 4
NAMES = (
    "checkpoint/store.py",
    "checkpoint/source.py",
    "checkpoint/placement.py",
    "parallel/arrays.py",
    "trainer/program.py",
    "trainer/build.py",
    "trainer/frozen_arrays.py",
    "trainer/states.py",
)
READERS = tuple(str(Path(api.__file__).parent / name) for name in NAMES)
REPLICATED = 20_000  # maximum bytes of the arrays that every device holds, such as gains and counters


class Peak:
    """The maximum number of bytes that a device holds, beyond those at the start."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # `sample` collects only objects that are made after this line, which is quick
        self.before = held()
        self.bytes = 0

    def sample(self) -> None:
        if self._now() > self.bytes:
            gc.collect()  # garbage of Python is no part of the arrays that are read
            self.bytes = max(self.bytes, self._now())

    def _now(self) -> int:
        return max((size - self.before[device] for device, size in held().items()), default=0)


def held() -> Counter[Any]:
    """Return the bytes of the live arrays on each device; arrays that share a buffer (a shard and its array) count once."""
    buffers: dict[tuple[Any, int], int] = {}
    for array in jax.live_arrays():
        if array.is_deleted():
            continue
        for shard in array.addressable_shards:
            buffers[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    found: Counter[Any] = Counter()
    for (device, _), size in buffers.items():
        found[device] += size
    return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Peak]]:
    """Yield a function that starts to measure while weights are read and a state is made, but not while it is trained."""
    peaks: list[Peak] = []

    # A function that returns still holds its arrays. A thread that samples would also keep alive what it lists.
    def sample(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code.co_filename.startswith(READERS):
            peaks[-1].sample()

    @contextmanager
    def sampling() -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(sample)
        try:
            yield
        finally:
            sys.setprofile(before)

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
        (WeightSource, "read"),
        (WeightSource, "read_frozen"),
        (Program, "init"),
        (Program, "restore"),
        (build, "with_arrays"),
    ):
        monkeypatch.setattr(target, name, measured(getattr(target, name)))

    def start() -> Peak:
        peaks.append(Peak())
        return peaks[-1]

    yield start
    gc.unfreeze()


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
        pytest.param(["--train.scan-layers"], 3, marks=pytest.mark.long),
        (["--lora.rank", "2"], 1),
        pytest.param(["--lora.rank", "2", "--train.scan-layers"], 1, marks=pytest.mark.long),
    ],
    ids=["all", "scan", "lora", "lora-scan"],
)
def test_a_run_starts_and_resumes_with_the_shards_of_each_device(
    base: Path, watch: Callable[[], Peak], words: list[str], arrays: int
) -> None:
    Path("text.txt").write_text(TEXT * 40)
    largest = LARGEST * (MODEL.n_layer if "--train.scan-layers" in words else 1)
    most = arrays * 4 * count_parameters(MODEL) / 8 + largest + arrays * REPLICATED
    peak = watch()
    result = jaxgpt("train", "finetune", "--init-from", str(base), *RUN, *words, "--out", "run")
    assert result.code == 0, result.err
    assert 0 < peak.bytes < most
    peak = watch()
    result = jaxgpt("train", "--resume", "--out", "run", "--train.steps", "3")
    assert result.code == 0, result.err
    assert 0 < peak.bytes < most


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "tensor": 4}], ids=str)
def test_merged_adapters_have_the_bits_of_a_single_device(base: Path, tmp_path: Path, axes: dict[str, int]) -> None:
    """The checksum of a base does not depend on the mesh, even if the base is a merged model; no axis divides the 27 ids."""
    lora = LoraConfig(rank=2, alpha=8.0, targets="q_proj,down_proj")
    lora_run(tmp_path / "adapted", base, lora)
    one = api.load(tmp_path / "adapted")
    several = api.load(tmp_path / "adapted", mesh=mesh_of(**axes))
    jax.tree.map(np.testing.assert_array_equal, several.params, one.params)
    kernel = several.params["h_0"]["attn"]["q_proj"]["kernel"]
    assert not kernel.sharding.is_fully_replicated
    assert several.params["wte"]["embedding"].sharding.device_set == kernel.sharding.device_set
    frozen = open_source(tmp_path / "adapted").read_frozen(Place(mesh_of(**axes)))
    assert frozen.checksum == checksum(one.params)


@pytest.mark.ci
def test_a_model_on_a_mesh_generates_the_same_text(base: Path) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}
    mesh = mesh_of(data=2, tensor=4)
    for weights in (None, "int8"):
        found = api.generate(api.load(base, weights=weights, mesh=mesh), ["To be", "or"], **settings)
        wanted = api.generate(api.load(base, weights=weights), ["To be", "or"], **settings)
        assert [out.ids for out in found] == [out.ids for out in wanted], weights


@pytest.mark.parametrize("mesh", [4, MeshConfig(fsdp=4), jax.sharding.Mesh(np.array(jax.devices()), ("x",))])
def test_a_mesh_has_the_axes_of_the_sharding_table(base: Path, mesh: Any) -> None:
    with pytest.raises(
        UserError,
        match=r"mesh must be a mesh with the axes data, fsdp, expert, context, tensor, as .*make_mesh returns it",
    ):
        api.load(base, mesh=mesh)
