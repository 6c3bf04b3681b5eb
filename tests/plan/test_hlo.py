"""Parsing collectives and loops from the text of compiled programs."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.bench.layers import layer_of
from jaxgpt.model.gpt import GPT
from jaxgpt.model.init import init_params
from jaxgpt.model.scan import ScannedGPT, stack_layers
from jaxgpt.plan.collectives import Collective
from jaxgpt.plan.device_groups import DeviceGroup, read_group
from jaxgpt.plan.hlo import array_bytes, read_computations
from jaxgpt.plan.program_text import read_program
from jaxgpt.plan.source_paths import site_of

MODULES = """
    ln_1 ln_2 attn attn/q_proj attn/k_proj attn/v_proj attn/o_proj mlp mlp/up_proj mlp/down_proj
""".split()
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SIZES, st.data())
def test_groups_as_axes_of_a_mesh(sizes: list[int], data: st.DataObject) -> None:
    """The first group along some axes are the devices that share the first coordinate of all others, in any notation."""
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    order = data.draw(st.permutations(range(len(sizes))))
    names = [f"a{i}" for i in range(len(sizes))]
    shape = dict(zip(names, sizes, strict=True))
    mesh = ",".join(f"'{name}'={size}" for name, size in shape.items())
    axes = ",".join(f"'a{i}'" for i in chosen)
    expected = [
        number
        for number, place in enumerate(np.ndindex(*sizes))
        if all(place[i] == 0 for i in range(len(sizes)) if i not in chosen)
    ]
    line = f"replica_groups=mesh[{mesh}] {{{axes}}}, dimensions={{0}}"
    assert sorted(read_group(line, 1000).devices) == expected
    assert set(DeviceGroup(expected).axes(shape)) == {names[i] for i in chosen if sizes[i] > 1}

    # The same group as a transposed array of groups.
    order = [i for i in range(len(sizes)) if i not in chosen] + [i for i in order if i in chosen]
    rows = math.prod(sizes[i] for i in range(len(sizes)) if i not in chosen)
    grid = f"[{rows},{math.prod(sizes) // rows}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    assert sorted(read_group(f"replica_groups={grid}, x=1", 1000).devices) == expected


@pytest.mark.parametrize(
    ("line", "group"),
    [
        ("replica_groups={{0,2},{1,3}}, to_apply=x", [0, 2]),
        ("source_target_pairs={{0,1},{1,2},{2,0}}", [0, 1, 2]),
        ("replica_groups=mesh['a'=8,'b'=2] {'a':(2)2,'b'}, x=1", [0, 1, 4, 5]),  # 2 of the 8
        ("replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}, x=1", [0, 2]),
        ("replica_groups=[2,4]<=[8], x=1", [0, 1, 2, 3]),
        ("replica_groups={}, to_apply=x", [0, 1, 2, 3, 4]),
        ("x = f32[] all-reduce(y), replica_groups=[2,3]<=[3,2]T(1,0), to_apply=z", [0, 2, 4]),
    ],
)
def test_other_notations_of_groups(line: str, group: list[int]) -> None:
    assert read_group(line, 5).devices == group
    with pytest.raises(ValueError, match="unknown syntax"):
        read_group("replica_groups=somehow", 1000)


def test_the_axes_of_a_permutation_are_those_along_which_data_move() -> None:
    group = read_group("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", 4)
    assert group.devices == [0, 1, 2, 3]
    assert group.axes({"data": 2, "tensor": 2}) == ("tensor",)
    assert group.axes({"data": 2}) == ()


@pytest.mark.parametrize(
    ("path", "site"),
    [
        ("jit(train)/jvp(GPT.hidden_and_sides)/GPT.blocks/h_1/attn/attn._project/k_proj/dot_general", "h/attn/k_proj"),
        ("jit(train)/transpose(jvp(GPT))/GPT.blocks/h_0/h_0.feed_forward/mlp/shard_map/psum", "h/mlp, backward"),
        ("jit(train)/jvp(GPT.head)/wte.logits/dot_general", "wte.logits"),
        ("jit(train)/GPT.blocks/h_1/mlp/add;jit(train)/GPT.blocks/h_0/attn/o_proj/mul", "h/mlp"),
        (
            "jit(train)/GPT.blocks/h_1/attn/(attn._project/q_proj/dot_general:attn._project/k_proj/dot_general)",
            "h/attn",
        ),
        ("jit(train)/ScannedGPT.blocks/while/body/closed_call/h/mlp/while/body/down_proj/add", "h/mlp/down_proj"),
        ("jit(train)/ScannedGPT.blocks/while/cond/lt", "ScannedGPT.blocks"),
        ("jit(train)/add", ""),
        ("", ""),
    ],
)
def test_sites_of_collectives(path: str, site: str) -> None:
    assert site_of(path) == site


def compiled_gradient(model: GPT, stack: bool) -> str:
    """Return the HLO text of the gradient of the summed logits of a model."""
    params = jax.eval_shape(lambda: init_params(GPT(model.config)))
    if stack:
        params = jax.eval_shape(stack_layers, params)
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def loss(params: Any, tokens_BT: jax.Array) -> jax.Array:
        return model.apply({"params": params}, tokens_BT).sum()

    return jax.jit(jax.grad(loss)).lower(params, tokens).compile().as_text()


@pytest.mark.ci
@pytest.mark.parametrize("kind", [GPT, ScannedGPT])
def test_sites_and_layers_of_a_compiled_gradient_with_remat(kind: type[GPT]) -> None:
    """Stacked and unstacked layers have the same sites, and no name of a loop, of remat or of a merged instruction."""
    stack = kind is ScannedGPT
    model = kind(small("gpt2", n_layer=2), remat=jax.checkpoint_policies.nothing_saveable)
    text = compiled_gradient(model, stack)
    computations, _ = read_computations(text)
    paths = {each.path for body in computations.values() for each in body.values()}
    paths = {path for path in paths if "GPT.blocks/" in path}

    sites = {site_of(path).removesuffix(", backward") for path in paths}
    names = {"h", *(f"h/{name}" for name in MODULES)}
    assert sites <= names | {f"{kind.__name__}.blocks"}
    assert {"h/attn/q_proj", "h/mlp/down_proj"} <= sites

    layers = {layer_of(path).removesuffix(" backward") for path in paths} - {""}
    blocks = ["h"] if stack else ["h_0", "h_1"]
    assert layers <= {*blocks, *(f"{block}/{name}" for block in blocks for name in MODULES)}
    assert {f"{block}/attn/q_proj" for block in blocks} <= layers


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("f32[2,3]{1,0:T(8,128)}", [24]),
        ("(bf16[4]{0}, u32[], pred[3])", [8, 4, 3]),
        ("f8e4m3fn[5]", [5]),
        ("token[]", [0]),
    ],
)
def test_array_bytes(shape: str, sizes: list[float]) -> None:
    assert array_bytes(shape) == sizes


PROGRAM = """HloModule m, is_scheduled=true, num_partitions=16
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %i = s32[] get-tuple-element(%p), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %ar = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %t = (s32[], /*index=1*/f32[8]{0}) tuple(%next, %ar)
}
%piece.1 (p: f32[8]) -> f32[32] {
  ROOT %ag.1 = f32[32]{0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}
%piece.2 (p: f32[8]) -> f32[32] {
  ROOT %ag.2 = f32[32]{0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}
%all-reduce-scatter.1 (p: f32[32]) -> f32[8] {
  %ar.1 = f32[32]{0} all-reduce(%p), channel_id=8, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[8]{0} dynamic-slice(%ar.1, %offset), dynamic_slice_sizes={8}
}
%condition (p: (s32[], f32[8])) -> pred[] {
  %end = s32[]{:T(128)} constant(11)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %end), direction=LT, metadata={}
}
%unused (p: f32[8]) -> f32[8] {
  ROOT %all = f32[8]{0} all-to-all(%p), channel_id=9, replica_groups=[1,4]<=[4], dimensions={0}
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%body
  %f1 = f32[32]{0} fusion(%a), kind=kCustom, calls=%piece.1
  %f2 = f32[32]{0} fusion(%a), kind=kCustom, calls=%piece.2
  %rs = f32[8]{0} fusion(%f1), kind=kCustom, calls=%all-reduce-scatter.1
  %ps = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%a), channel_id=3, source_target_pairs={{0,1},{1,0}}
  %pd = f32[8]{0} collective-permute-done(%ps)
  %pp = ((f32[8], f32[4]), (f32[8], f32[4])) collective-permute-start(%a, %b), channel_id=6, source_target_pairs={{0,1},{1,0}}
  %as = ((f32[8]{0}, f32[8]{0}), (f32[4]{0}, f32[4]{0})) reduce-scatter-start(%a, %b), channel_id=5, replica_groups=[1,2]<=[2]
  %everyone = f32[4]{0} all-reduce(%a), replica_groups={}, to_apply=%add
  %s = (f32[4]{0}, u32[], token[]) send(%a, %tok), channel_id=4, is_host_transfer=true, frontend_attributes={\
_xla_megascale_target="{1:3}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}
}
"""


def test_trip_counts_split_collectives_and_fused_reduce_scatters() -> None:
    collectives, loops = read_program(PROGRAM)
    assert loops
    assert set(collectives) == {
        Collective("all-reduce", 16, 16),
        Collective("all-reduce", 32, 4, 6),
        Collective("all-gather", 128, 4),
        Collective("reduce-scatter", 32, 4),
        Collective("reduce-scatter", 32, 2),
        Collective("collective-permute", 32, 2),
        Collective("collective-permute", 32 + 16, 2),
        Collective("all-reduce", 16, 3, 1, between_slices=True, axes=("data",)),
    }


def test_names_without_a_percent_sign_are_the_same() -> None:
    assert read_program(PROGRAM.replace("%", "")) == read_program(PROGRAM)


def test_the_trip_count_of_a_loop_whose_counter_is_in_fusions() -> None:
    less = "ROOT %wrapped_compare = pred[] fusion(%i, %end), kind=kLoop, calls=%wrapped_compare_computation"
    fused = """%wrapped_compare_computation (p0: s32[], p1: s32[]) -> pred[] {
  %p0 = s32[] parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %compare = pred[] compare(%p0, %p1), direction=LT
}
%add_two (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %constant = s32[] constant(2)
  ROOT %add = s32[] add(%p, %constant)
}
"""
    text = PROGRAM.replace("ROOT %less = pred[] compare(%i, %end), direction=LT, metadata={}", less)
    text = text.replace("%next = s32[] add(%i, %two)", "%next = s32[] fusion(%i), kind=kLoop, calls=%add_two")
    text = text.replace("%body (p:", fused + "%body (p:")
    for each in (text, text.replace("%", "")):
        collectives, _ = read_program(each)
        assert Collective("all-reduce", 32, 4, 6) in collectives


@given(st.sampled_from(["all-gather", "all-to-all"]), st.integers(2, 64), st.floats(1, 1e9))
def test_bytes_sent(kind: str, group: int, size: float) -> None:
    """An all-reduce sends as many bytes as a reduce-scatter and an all-gather; a group of one sends nothing."""
    part = Collective("reduce-scatter", size / group, group).sent
    assert Collective("all-reduce", size, group).sent == pytest.approx(
        part + Collective("all-gather", size, group).sent
    )
    assert Collective(kind, size, 1).sent == Collective("all-reduce", size, 1).sent == 0


@pytest.mark.parametrize("trips", [1, 5])
def test_a_compiled_loop_of_all_reduces(trips: int) -> None:
    """A program that sums 40 numbers over 8 devices in a loop has one 160-byte collective per trip."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("a",))

    def work(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, trips, lambda i, y: jax.lax.psum(jnp.sin(y), "a"), x)

    spec = PartitionSpec("a")
    mapped = jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((320,), jnp.float32, sharding=NamedSharding(mesh, spec))
    text = jax.jit(mapped).lower(x).compile().as_text()
    [one], _ = read_program(text)
    assert (one.kind, one.bytes, one.group, one.times) == ("all-reduce", 160, 8, trips)


@pytest.mark.parametrize("trips", [1, 3])
def test_collectives_in_shard_map_count_each(trips: int) -> None:
    """They share a channel. Tokens are gathered twice, in two types, and sums of them scattered, in a loop or alone."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "expert"))
    gather = functools.partial(jax.lax.all_gather, axis_name="expert", tiled=True)

    def work(x: jax.Array, ids: jax.Array) -> jax.Array:
        def one(x: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
            everyone = jnp.sin(gather(x)) * gather(ids + step)
            twice = gather(jnp.cos(x)) + everyone
            return jax.lax.psum_scatter(twice, "expert", tiled=True), None

        return jax.lax.scan(one, x, jnp.arange(trips))[0]

    spec = PartitionSpec(("data", "expert"))
    mapped = jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    place = NamedSharding(mesh, spec)
    arguments = (
        jax.ShapeDtypeStruct((32, 5), jnp.float32, sharding=place),
        jax.ShapeDtypeStruct((32, 1), jnp.int32, sharding=place),
    )
    text = jax.jit(mapped).lower(*arguments).compile().as_text()
    assert len(set(re.findall(r"channel_id=(\d+)", text))) == 1
    collectives, _ = read_program(text, mesh.shape)
    assert {(each.axes, each.group, each.times) for each in collectives} == {(("expert",), 4, trips)}
    # 4 rows per device, of 5 float32 or 1 int32.
    gathered = sorted(each.bytes for each in collectives if each.kind == "all-gather")
    assert gathered == [4 * 16 * 1, 4 * 16 * 5, 4 * 16 * 5]
    assert [each.bytes for each in collectives if each.kind == "reduce-scatter"] == [4 * 4 * 5]
