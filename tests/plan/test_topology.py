"""Parsing of topology names, their errors, and the position of slices in the mesh."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.kernels import best, of_device
from jaxgpt.kernels.flash import cudnn_attention, splash_attention
from jaxgpt.ops.attention import attend
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.plan.attention import attention_of
from jaxgpt.plan.compilers import compiler_missing, devices_of
from jaxgpt.plan.topology import CHIPS, larger_slices, parse_topology

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@given(st.sampled_from(sorted(CHIPS)), st.lists(st.integers(1, 8), min_size=2, max_size=3), st.integers(1, 4))
def test_number_of_devices(name: str, halves: list[int], slices: int) -> None:
    grid = [2 * n if i < 2 else n for i, n in enumerate(halves)] if CHIPS[name].tpu else [halves[0]]
    topology = parse_topology(f"{name}:{'x'.join(map(str, grid))}", slices)
    assert topology.n_devices == math.prod(grid) * slices * CHIPS[name].per_chip
    assert f"{name}:{'x'.join(map(str, grid))}" in str(topology)


@given(st.sampled_from(["v4", "v5e", "v5p", "v6e"]), st.integers(1, 9), st.integers(1, 9))
def test_the_suggested_grid_is_valid(name: str, rows: int, columns: int) -> None:
    try:
        parse_topology(f"{name}:{rows}x{columns}")
    except UserError as e:
        near = str(e).split("use ")[1]
        assert parse_topology(near).n_devices >= rows * columns


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v5f:2x4", "chips: v4, v5e"),
        ("v5e", "no valid grid"),
        ("v5e:0x4", "no valid grid"),
        ("v5e:2x2x2x2", "no valid grid"),
        ("v5e:3x3", "use v5e:4x4"),
        ("v5e-", r"did you mean v5e\?"),
        ("v5e-7", r"unknown slice 'v5e-7': v5e-N has N = 1, 4, 8, .*, 256 \(chips\)"),
        ("v5litepod-512", "v5litepod-N has N = 1, 4, 8"),
        (
            "v5p-4",
            r"N = 8, 16, 32, .* \(TensorCores, two per chip\); for a different size, write the grid, as in v5p:16x16x24",
        ),
        ("v3-8", "unknown chip 'v3-8'"),
        ("h100-8", "unknown chip 'h100-8'"),
        ("h100:32", "use --topology h100:8 --slices 4$"),
        ("a100:4x3", "use --topology a100:6 --slices 2$"),
        ("custom:8", "needs peak, hbm and bandwidth, as in custom:8,peak=312T,hbm=80G,bandwidth=2039G$"),
        ("custom:8,peak=0T,hbm=80G,bandwidth=2039G", "topology number 'peak=0T'"),
        ("h100:8,memory=94G", "topology number 'memory=94G': use one of peak, hbm, bandwidth, link, network"),
    ],
)
def test_bad_names_raise_one_line(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        parse_topology(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "chips"),
    [
        ("v5e-8", "v5e:2x4", 8),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v5e-1", "v5e:1x1", 1),
        ("V6E-256", "v6e:16x16", 256),
        ("v4-32", "v4:2x2x4", 16),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v5p-12288", "v5p:16x16x24", 6144),
    ],
)
def test_google_cloud_names(name: str, text: str, chips: int) -> None:
    """v4 and v5p count TensorCores, v5e and v6e chips."""
    topology = parse_topology(name)
    assert (str(topology), topology.n_devices) == (text, chips)
    with pytest.raises(UserError, match="--slices must be at least 1, not 0"):
        parse_topology(name, 0)


def test_a_chip_by_its_numbers() -> None:
    numbers = ",peak=312T,hbm=80G,bandwidth=2039G,link=300G,network=25G"
    custom, known = parse_topology(f"custom:8{numbers}"), parse_topology("a100:8")
    assert custom.chip[2:7] == known.chip[2:7]
    assert parse_topology("h100:8,hbm=94G").chip == CHIPS["h100"]._replace(hbm=94e9)


@pytest.mark.parametrize(
    ("topology", "dtype", "attention"),
    [
        ("v5e:2x4", "float32", "splash, without stored T x T scores"),
        ("h100:8", "bfloat16", "cudnn, without stored T x T scores"),
        ("custom:2,peak=165T,hbm=24G,bandwidth=1008G", "bfloat16", "cudnn, without stored T x T scores"),
        (
            "h100:8",
            "float32",
            "attention by xla, with all T x T scores in memory: cudnn needs train.compute_dtype bfloat16",
        ),
        ("mi300x:8", "bfloat16", "needs an NVIDIA GPU"),
    ],
)
def test_the_attention_of_a_chip(topology: str, dtype: str, attention: str) -> None:
    model = ModelConfig(vocab_size=64, block_size=2048, n_layer=1, n_head=1, n_embd=64)
    config = Config(model=model, train=TrainConfig(compute_dtype=dtype))  # type: ignore[arg-type]
    assert attention in attention_of(config, parse_topology(topology))


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_best_operations_of_a_chip_that_is_not_here(name: str) -> None:
    """They are the operations for a device of this platform."""
    config = Config(model=ModelConfig(vocab_size=64, head_dim=64), train=TrainConfig(compute_dtype="bfloat16"))
    grid = "2x2" if CHIPS[name].tpu else "1"
    target = parse_topology(f"{name}:{grid}").target
    ops = best(config, target)
    kernels = {"tpu": splash_attention, "gpu": cudnn_attention if name != "mi300x" else attend}
    assert ops == of_device(target, "bfloat16")._replace(attend=kernels[target.platform])  # type: ignore[arg-type]


def test_larger_slices_grow() -> None:
    sizes = [each.n_devices for each in larger_slices(parse_topology("v5e:2x4"))]
    assert sizes == [16, 32, 64, 128, 256]
    assert [each.n_devices for each in larger_slices(parse_topology("h100:6"))] == [7, 8]
    assert larger_slices(parse_topology("h100:8", 2)) == []


def test_a_missing_or_mismatched_libtpu_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = parse_topology("v5e:2x4")
    assert "no compiler" in compiler_missing(parse_topology("a100:8"))
    assert "several GPU machines" in compiler_missing(parse_topology("h100:8", 2))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[tpu]'" in compiler_missing(topology)
    assert "pip install -e '.[cuda13]'" in compiler_missing(parse_topology("h100:8"))
    with pytest.raises(UserError, match="not installed"):
        devices_of(topology)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    versions = {"libtpu": "0.0.1", "jax": importlib.metadata.version("jax")}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    assert f"pip install 'jax[tpu]=={versions['jax']}'" in compiler_missing(topology)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ['libtpu==0.0.1.*; extra == "tpu"'])
    versions["libtpu"] = "0.0.1.9"
    assert not compiler_missing(topology)


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        ("ABORTED: Internal error when accessing libtpu multi-process lockfile.", "another process"),
        ("INVALID_ARGUMENT: no such layout", "does not support v5e:2x4: INVALID_ARGUMENT"),
    ],
)
def test_libtpu_errors_become_one_line(monkeypatch: pytest.MonkeyPatch, raised: str, says: str) -> None:
    from jax.experimental import topologies

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError(raised)

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    monkeypatch.setattr("jaxgpt.plan.compilers.compiler_missing", lambda topology: "")
    with pytest.raises(UserError, match=says):
        devices_of(parse_topology("v5e:2x4"))


@pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
@pytest.mark.parametrize(("name", "slices"), [("v4:2x2x1", 1), ("v5e:1x1", 1), ("tpu7x:2x2x1", 1), ("v6e:4x4", 2)])
def test_libtpu_supports_the_chips(name: str, slices: int) -> None:
    topology = parse_topology(name, slices)
    devices = devices_of(topology)
    assert len(devices) == topology.n_devices
    mesh = make_mesh(MeshConfig(data=slices, fsdp=topology.n_devices // slices, tensor=1), devices)
    if slices > 1:
        assert [{d.slice_index for d in row.flat} for row in mesh.devices] == [{0}, {1}]
