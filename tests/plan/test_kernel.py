"""Estimates trace the attention kernel of the chip, count all its products, and add the time of recomputation."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import Config, MeshConfig, TrainConfig
from jaxgpt.counts import flops_per_token
from jaxgpt.kernels.flash import splash_attention
from jaxgpt.ops.attention import Visible, row_positions
from jaxgpt.plan.abstract import TPU, abstract_program
from jaxgpt.plan.estimate import estimate
from jaxgpt.plan.flops import count_flops
from jaxgpt.plan.kernel import KernelShape, product_flops
from jaxgpt.plan.microbatch import trace
from jaxgpt.plan.one_device import one_device
from jaxgpt.plan.topology import parse_topology

V5E = parse_topology("v5e:2x4")


def config(remat: str = "none", **changes: Any) -> Config:
    sizes = {"n_embd": 64, "n_head": 2, "vocab_size": 512, "block_size": 128, "n_layer": 2}
    train = TrainConfig(batch_size=16, remat=remat, compute_dtype="bfloat16")  # type: ignore[arg-type]
    return Config(model=small("gpt2", **(sizes | changes)), train=train, mesh=MeshConfig(data=8, tensor=1))


def saved_shapes(attention: Any, heads: int) -> Counter[tuple[int, ...]]:
    """Return the shapes of the large arrays that an attention function saves for its backward pass."""
    B, T, N, H = 2, 256, 4, 64
    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((B, heads, T, H), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((B, heads, H, T), jnp.bfloat16)

    def residuals(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        _, backward = jax.vjp(lambda *qkv: attention(*qkv, Visible(row_positions(T)), 1.0, None), q, k, v)
        return backward

    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(residuals, q, k, v))]
    return Counter(
        tuple(sorted(size for size in shape if size > 1)) for shape in shapes if math.prod(shape) >= B * N * T
    )


@pytest.mark.parametrize("heads", [4, 2])
def test_the_shape_of_a_kernel_saves_what_splash_attention_saves(heads: int) -> None:
    assert saved_shapes(KernelShape(), heads) == saved_shapes(splash_attention, heads)


@given(st.integers(1, 12), st.integers(0, 15))
def test_products_are_counted_over_visible_pairs(T: int, window: int) -> None:
    visible = Visible(row_positions(T), None, window)
    pairs = int(np.asarray(visible.mask()).sum())
    assert product_flops((3, T, 2, 5), window) == 2 * 5 * 3 * 2 * pairs


def test_activations_with_a_kernel_grow_with_the_window_and_without_with_its_square() -> None:
    def activations(T: int, attention: str) -> float:
        run = config(block_size=T, positions="none")
        run = replace(run, train=replace(run.train, attention=attention))  # type: ignore[arg-type]
        return estimate(run, V5E).memory["activations"]

    assert activations(4096, "auto") == pytest.approx(2 * activations(2048, "auto"), rel=0.01)
    assert activations(4096, "xla") > 3.5 * activations(2048, "xla")
    with pytest.raises(ValueError, match="cudnn does not run on tpu devices"):
        activations(2048, "cudnn")


def test_recomputation_takes_time_but_is_no_model_flops() -> None:
    costs = {remat: estimate(config(remat), V5E) for remat in ("none", "dots", "full")}
    compute = {remat: cost.seconds(V5E.chip)["compute"] for remat, cost in costs.items()}
    assert compute["none"] == compute["dots"] < compute["full"]
    assert len({cost.model_flops for cost in costs.values()}) == 1
    assert costs["full"].recomputed_flops == costs["full"].computed_flops - costs["none"].computed_flops
    # A block is computed again except its last product, which no gradient needs.
    model = config().model
    rows = 2 * model.block_size
    products = 2 * rows * 8 * model.n_embd**2 + 2 * product_flops((2, model.block_size, 2, 32), 0)
    assert costs["full"].recomputed_flops == pytest.approx(model.n_layer * products)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_traced_flops_are_those_of_the_lowered_program(remat: str) -> None:
    """The count of an unoptimized program is a few percent higher, because of norms and softmax."""
    run = config(remat, n_embd=256)
    part = one_device(replace(run, train=replace(run.train, attention="xla")))
    program = abstract_program(part, TPU)
    arguments = program.abstract.state.params, program.batches.abstract()
    plain = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), arguments)

    def loss(params: Any, batch: Any) -> jax.Array:
        return program.pure_step.objective(params, batch, None, ()).minimized.sum()

    counted = jax.jit(jax.grad(loss)).lower(*plain).cost_analysis()["flops"]  # type: ignore[index]
    assert trace(part, TPU).flops == pytest.approx(counted, rel=0.06)


def test_traced_flops_of_experts_are_those_of_the_active_experts() -> None:
    """The router's products, in no formula, are small."""
    run = config(n_experts=4, bias=False, mlp="gated", n_inner=256)
    part = one_device(replace(run, train=replace(run.train, attention="xla")))
    model = flops_per_token(part.model, abstract_program(part, TPU).abstract.weights, part.window)
    assert trace(part, TPU).flops == pytest.approx(model * 2 * part.window, rel=0.02)


def test_loops_and_branches_are_counted() -> None:
    """The body of a scan counts once per iteration, and a choice of platform counts as its branch of accelerators."""
    x = jnp.zeros((8, 8))

    def work(x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda y, _: (y @ x, None), x, length=5)
        return jax.lax.platform_dependent(y, cpu=lambda y: y @ y @ y, default=lambda y: y @ y)

    assert count_flops(jax.make_jaxpr(work)(x).jaxpr) == 6 * 2 * 8**3
