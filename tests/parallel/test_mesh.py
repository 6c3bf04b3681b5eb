"""Resolving the mesh, microbatches, and the sharding table."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import small
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxgpt.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.parallel.mesh import make_mesh, resolve
from jaxgpt.parallel.rows import microbatches
from jaxgpt.parallel.rules import AXES, RULES, change_rules, partition_spec, rules_for
from jaxgpt.presets import preset


def config(mesh: MeshConfig, batch_size: int = 12, **model: int) -> Config:
    small_model = small("gpt2", **{"vocab_size": 64} | model)
    return Config(model=small_model, train=TrainConfig(batch_size=batch_size), mesh=mesh)


@pytest.mark.parametrize(
    ("mesh", "batch", "devices", "expected", "says"),
    [
        (MeshConfig(), 12, 1, (1, 1, 1), ""),
        (MeshConfig(), 12, 2, (2, 1, 1), ""),
        # Two windows each, as on 8 devices.
        (MeshConfig(), 12, 8, (6, 1, 1), "6 of 8 devices in use (data 6): a larger --train.batch-size or"),
        (MeshConfig(), 7, 2, (2, 1, 1), "1 of 8 windows per step are padding: --train.batch-size 8 would use them"),
        (MeshConfig(), 32, 3, (3, 1, 1), "1 of 33 windows per step are padding"),
        (MeshConfig(), 1, 8, (1, 1, 1), "1 of 8 devices in use (data 1)"),
        (MeshConfig(), 16, 8, (8, 1, 1), ""),
        (MeshConfig(tensor=2), 16, 8, (4, 1, 2), ""),
        (MeshConfig(tensor=4), 3, 8, (2, 1, 4), "1 of 4 windows per step are padding"),
        (MeshConfig(data=1, fsdp=-1), 16, 8, (1, 8, 1), ""),
        (MeshConfig(fsdp=-1), 16, 8, (1, 8, 1), ""),
        (MeshConfig(fsdp=-1), 12, 12, (3, 4, 1), ""),  # 8 would leave 4 devices idle
        (MeshConfig(tensor=-1), 16, 8, (2, 1, 4), ""),
        (MeshConfig(data=2, tensor=-1), 16, 8, (2, 1, 4), ""),
        (MeshConfig(data=2, fsdp=2, tensor=2), 16, 8, (2, 2, 2), ""),
        (MeshConfig(data=2, fsdp=4), 12, 9, (2, 4, 1), "8 of 9 devices in use (data 2 x fsdp 4): a different mesh"),
        (MeshConfig(data=8), 12, 8, (8, 1, 1), "4 of 16 windows per step are padding"),
    ],
)
def test_devices_used(mesh: MeshConfig, batch: int, devices: int, expected: tuple[int, int, int], says: str) -> None:
    resolved, note = resolve(config(mesh, batch), devices)
    assert (resolved.data, resolved.fsdp, resolved.tensor) == expected
    assert note.startswith(says) if says else not note


@pytest.mark.parametrize(
    ("name", "asked", "fixed"),
    [("gpt2", {}, {"vocab_size": 50304}), ("llama-tiny", {"vocab_size": 64}, {"n_kv_head": 4})],
)
def test_work_that_tensor_does_not_divide_is_noted(name: str, asked: dict[str, int], fixed: dict[str, int]) -> None:
    run = replace(preset(name), mesh=MeshConfig(tensor=4)).with_model(**asked)
    assert resolve(run, 8)[1].endswith(": use a multiple of 4")
    assert not resolve(run.with_model(**fixed), 8)[1]


@settings(max_examples=300)
@given(st.integers(1, 600), st.integers(1, 600), st.one_of(st.integers(1, 64), st.just(4096)))
def test_microbatches_hold_every_window_and_are_at_most_as_large_as_on_one_device(
    batch: int, accumulation: int, ways: int
) -> None:
    train = TrainConfig(batch_size=batch, accumulation=accumulation)
    count, rows = microbatches(train, ways)
    each = rows // ways
    share = math.ceil(batch / ways)
    most = math.ceil(batch / accumulation)
    assert rows == each * ways
    assert 1 <= each <= most
    assert count * each >= share, "every window is in a microbatch"
    assert (count - 1) * each < share, "no microbatch is all padding"
    fewest = math.ceil(share / most)
    assert fewest <= count < 2 * fewest or count == 1
    assert count * each - share < fewest, "at most one window of padding per device and microbatch"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (config(MeshConfig(data=16)), r"the mesh needs 16 devices \(data 16\), but only 8 exist: use --mesh.data -1, "),
        (
            config(MeshConfig(data=3, fsdp=2, tensor=8)),
            r"needs 48 devices \(data 3 x fsdp 2 x tensor 8\), but only 8 exist: ",
        ),
        (config(MeshConfig(data=1, tensor=8)), "mesh.tensor 8 does not divide model.n_head 4: "),
        (config(MeshConfig(data=1, fsdp=8), n_embd=20), "mesh.fsdp 8 does not divide model.n_embd 20: "),
    ],
)
def test_invalid_sizes_raise_with_both_numbers(made: Config, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(made, 8)


@settings(max_examples=100)
@given(
    st.tuples(*[st.sampled_from([-1, 1, 2, 3, 4, 6, 8, 2**17])] * 3).filter(lambda sizes: sizes[1:] != (-1, -1)),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 40),
    st.integers(1, 64),
    st.sampled_from([12, 20, 64]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_a_mesh_fits_or_the_suggested_mesh_does(
    sizes: tuple[int, int, int],
    expert: int,
    context: int,
    devices: int,
    batch: int,
    width: int,
    processes: int,
    tpu: bool,
) -> None:
    data, fsdp, tensor = sizes
    mesh = MeshConfig(data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor)
    asked = config(mesh, batch, n_embd=width, n_experts=4, bias=False)
    try:
        found, _ = resolve(asked, devices, processes, tpu)
    except UserError as e:
        flags = re.findall(r"--mesh\.(\w+) (-?\d+)", str(e).partition(": use ")[2])
        mesh = replace(asked.mesh, **{axis: int(size) for axis, size in flags})
        found, _ = resolve(replace(asked, mesh=mesh), devices, processes, tpu)
    used = math.prod(getattr(found, axis) for axis in AXES)
    assert 1 <= used <= devices
    assert used == devices or processes == 1
    assert devices % used == 0 or not tpu


@pytest.mark.parametrize(("slices", "mesh"), [((4, 2, 2), MeshConfig(data=6)), ((2, 2), MeshConfig(data=1, fsdp=4))])
def test_slices_that_do_not_split_the_data_axis_evenly_raise(slices: tuple[int, ...], mesh: MeshConfig) -> None:
    devices = [SimpleNamespace(platform="tpu", slice_index=n) for n, size in enumerate(slices) for _ in range(size)]
    with pytest.raises(
        UserError, match=r"cannot be split over \d slices \(\d.* devices\).* --mesh.data \d --mesh.fsdp -1"
    ):
        make_mesh(mesh, devices)


def test_axes_that_the_mesh_does_not_divide_are_not_sharded() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    odd = ModelConfig(vocab_size=65, n_head=4, n_kv_head=1)
    assert rules_for(odd, mesh)["vocab"] == ()
    assert rules_for(odd, mesh)["kv_heads"] == ()
    assert rules_for(replace(odd, vocab_size=64, n_kv_head=2), mesh) == RULES
    assert [rules_for(odd, mesh, rows=rows)["batch"] for rows in (3, 4, 6)] == [(), RULES["batch"], ()]


def test_colliding_axes_raise() -> None:
    assert partition_spec(("embed", "mlp"), RULES) == PartitionSpec(("fsdp",), ("tensor",))
    with pytest.raises(UserError, match="axes of an array over the same mesh axis: heads by tensor and mlp by tensor"):
        partition_spec(("heads", "mlp"), RULES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lenght": ("tensor",)}, r"no logical axis 'lenght' \(did you mean length\?\)"),
        ({"length": "tensor"}, "the rule of length must be a tuple of the mesh axes"),
        ({"length": ("tensors",)}, r"'tensor'\), not"),
        ({"length": ("fsdp", "fsdp")}, "the rule of length"),
        ({"batch": ("data",)}, r"the rule of batch must be \('data', 'fsdp', 'expert'\)"),
    ],
)
def test_invalid_rules_raise(changes: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(UserError, match=message):
        change_rules(changes)


def test_changing_one_rule_keeps_the_others() -> None:
    mesh = make_mesh(MeshConfig(data=1, tensor=4))
    rules = change_rules({"position": ("tensor",), "length": ("tensor",)})
    assert {name for name in RULES if rules[name] != RULES[name]} == {"position", "length"}
    assert rules_for(small("gpt2", block_size=12), mesh, rules)["position"] == ("tensor",)
    assert rules_for(small("gpt2", block_size=10), mesh, rules)["position"] == ()
    assert rules_for(small("gpt2", block_size=10), mesh, rules)["length"] == ()


def test_a_mesh_needs_resolved_sizes() -> None:
    """A size of -1 would silently omit the last device."""
    with pytest.raises(UserError, match=r"-1.*resolve"):
        make_mesh(MeshConfig(data=-1))
    with pytest.raises(UserError, match=r"the mesh \(2, 1, 1, 1, 3\) needs 6 devices, but only 2 exist: pass"):
        make_mesh(MeshConfig(data=2, tensor=3), [None, None])
