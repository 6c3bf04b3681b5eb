"""The mesh in numbers, and the table."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import pytest
from helpers import small
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxgpt.config import Config, MeshConfig, ModelConfig, TrainConfig, UserError
from jaxgpt.parallel.mesh import AXES, RULES, make_mesh, resolve, rules_for, spec


def config(mesh: MeshConfig, batch_size: int = 12, accumulation: int = 1, **model: int) -> Config:
    return Config(
        model=small("gpt2", **model), train=TrainConfig(batch_size=batch_size, accumulation=accumulation), mesh=mesh
    )


@pytest.mark.parametrize(
    ("mesh", "batch", "devices", "expected", "idle"),
    [
        (MeshConfig(), 12, 1, (1, 1, 1), False),
        (MeshConfig(), 12, 2, (2, 1, 1), False),
        (MeshConfig(), 12, 8, (6, 1, 1), True),
        (MeshConfig(), 7, 2, (1, 1, 1), True),
        (MeshConfig(), 16, 8, (8, 1, 1), False),
        (MeshConfig(tensor=2), 16, 8, (4, 1, 2), False),
        (MeshConfig(data=1, fsdp=-1), 16, 8, (1, 8, 1), False),
        (MeshConfig(data=2, tensor=-1), 16, 8, (2, 1, 4), False),
        (MeshConfig(data=2, fsdp=2, tensor=2), 16, 8, (2, 2, 2), False),
        (MeshConfig(data=2), 12, 8, (2, 1, 1), False),
    ],
)
def test_the_rest_goes_where_it_fits(
    mesh: MeshConfig, batch: int, devices: int, expected: tuple[int, int, int], idle: bool
) -> None:
    resolved, note = resolve(config(mesh, batch), devices)
    assert (resolved.data, resolved.fsdp, resolved.tensor) == expected
    assert bool(note) == idle


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            config(MeshConfig(data=16), 16),
            r"asks for 16 devices \(data 16\), there are 8: --mesh.data 8 --mesh.fsdp 1 --mesh.tensor 1 would do",
        ),
        (
            config(MeshConfig(data=3, fsdp=2, tensor=8), 6),
            r"asks for 48 devices \(data 3 x fsdp 2 x tensor 8\), there are 8: --mesh.data 1 --mesh.fsdp 2 --mesh.tensor 4",
        ),
        (
            config(MeshConfig(data=8)),
            "= 8 does not divide the 12 windows .* --mesh.data 6 .* would do, or a train.batch_size of",
        ),
        (
            config(MeshConfig(data=1, tensor=8), 16),
            "mesh.tensor 8 does not divide model.n_head 4: .* --mesh.tensor 4 would",
        ),
        # Five would divide the width, but not the batch.
        (config(MeshConfig(data=1, fsdp=8), 16, n_embd=20), "mesh.fsdp 8 does not divide model.n_embd 20: .*fsdp 4 "),
        # No batch helps three to divide the width.
        (config(MeshConfig(fsdp=3), 16), "mesh.fsdp 3 does not divide model.n_embd 16: --mesh.data 4 --mesh.fsdp 2 "),
        (config(MeshConfig(data=8), 16, accumulation=4), "= 8 does not divide the 4 windows"),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(made: Config, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(made, 8)


@settings(max_examples=50)
@given(
    st.tuples(*[st.integers(1, 2**17)] * 3),
    st.sampled_from([8, 2**17]),
    st.integers(1, 64),
    st.sampled_from([12, 20, 64]),
    st.sampled_from([1, 2]),
)
def test_the_mesh_that_would_do_does(
    sizes: tuple[int, int, int], devices: int, batch: int, width: int, processes: int
) -> None:
    """In time, too, however large the numbers are."""
    asked = config(MeshConfig(**dict(zip(AXES, sizes, strict=True))), batch, n_embd=width)
    try:
        resolve(asked, devices, processes)
    except UserError as e:
        offered = re.search(r"--mesh.data (\d+) --mesh.fsdp (\d+) --mesh.tensor (\d+) would do", str(e))
        if not offered and processes > 1:  # nothing is offered, or a batch
            assert "no such mesh" in str(e) or "--mesh.data -1 with a train.batch_size" in str(e)
            return
        assert offered
        mesh = MeshConfig(**dict(zip(AXES, map(int, offered.groups()), strict=True)))
        assert resolve(replace(asked, mesh=mesh), devices, processes) == (mesh, "")


def test_an_axis_that_the_mesh_does_not_divide_stays_whole() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    odd = ModelConfig(vocab_size=65, n_head=4, n_kv_head=1)
    assert rules_for(odd, mesh)["vocab"] == ()
    assert rules_for(odd, mesh)["kv_heads"] == ()
    assert rules_for(replace(odd, vocab_size=64, n_kv_head=2), mesh) == RULES


def test_axes_that_collide_are_refused() -> None:
    assert spec(("embed", "mlp"), RULES) == PartitionSpec(("fsdp",), ("tensor",))
    with pytest.raises(ValueError, match="collide"):
        spec(("heads", "mlp"), RULES)


def test_eight_devices_for_these_tests() -> None:
    assert jax.device_count() == 8
