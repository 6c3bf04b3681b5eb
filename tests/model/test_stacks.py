"""Stacks of weights, `[E, in, out]` and `[E, out]`: in each use of the table of weights, a stack is E separate weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import D, E, Experts, F
from helpers import compiled, random_ids, small
from jax.sharding import PartitionSpec

from jaxgpt.config import LoraConfig, MeshConfig
from jaxgpt.convert.tensor_layout import complete_leaves
from jaxgpt.convert.tensors import Format, WeightRow, expand, leaf_shapes, tensor_shape
from jaxgpt.convert.write_weights import tensors_of
from jaxgpt.counts import flops_per_token, multiplied_parameters, parameter_count
from jaxgpt.errors import UserError
from jaxgpt.kernels.stored import Stored
from jaxgpt.lm.weights import dequantize, quantize
from jaxgpt.model import GPT
from jaxgpt.model.gpt import Block
from jaxgpt.model.init import boxed_params
from jaxgpt.model.linear import Linear
from jaxgpt.model.lora import boxed_trained, init_lora, merge
from jaxgpt.model.params import Weight, abstract_params, count_parameters, flatten_params, weight_at, weights
from jaxgpt.model.scan import ScannedGPT, stack_layers
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import change_rules, shardings
from jaxgpt.train.muon import orthogonal
from jaxgpt.train.optimizer import decay_mask, muon_labels

CONFIG = small("gpt2", block_size=16, n_inner=F)
PLAIN = replace(CONFIG, mlp="plain", bias=False)


class ExpertBlock(Block):
    mlp = Experts


class ExpertGPT(GPT):
    block = ExpertBlock


class ExpertScannedGPT(ScannedGPT):
    block = ExpertBlock


MODEL = ExpertGPT(CONFIG)


def random_params() -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32), abstract_params(MODEL))


def up_proj(kernel: Any) -> Any:
    return {"h_0": {"mlp": {"up_proj": {"kernel": kernel}}}}


@pytest.mark.parametrize(
    ("axes", "stack", "kind"),
    [
        (("embed", "mlp"), 0, "matrix"),
        (("expert", "embed", "mlp"), 1, "matrix"),
        ((None, "embed", "mlp"), 1, "matrix"),
        ((None, "expert", "embed", "mlp"), 2, "matrix"),
        (("embed", "expert"), 0, "matrix"),
        (("norm",), 0, "vector"),
        (("expert", "norm"), 1, "vector"),
        (("expert",), 1, "vector"),
        ((), 0, "vector"),
        (("vocab", "embed"), 0, "table"),
        (("expert", "vocab", "embed"), 1, "table"),
        (("position", "embed"), 0, "positions"),
    ],
)
def test_the_kind_of_a_weight_depends_on_the_axes_after_its_stack(axes: Any, stack: int, kind: str) -> None:
    weight = Weight((2,) * len(axes), axes)
    assert (weight.stack, weight.kind) == (stack, kind)


def test_matrices_of_a_stack_decay_but_its_biases_do_not() -> None:
    params = abstract_params(MODEL)
    decay = flatten_params(decay_mask(params, MODEL))
    labels = flatten_params(muon_labels(params, MODEL))
    for name in ("up_proj", "down_proj"):
        assert (decay[f"h_0/mlp/{name}/kernel"], labels[f"h_0/mlp/{name}/kernel"]) == (True, "muon")
        assert (decay[f"h_0/mlp/{name}/bias"], labels[f"h_0/mlp/{name}/bias"]) == (False, "adam")


@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_muon_of_a_stack_equals_muon_of_each_matrix(name: str) -> None:
    shape = weights(MODEL)[f"h_0/mlp/{name}/kernel"].shape
    g_EIO = jax.random.normal(jax.random.key(0), shape) * jnp.array([1.0, 10.0, 0.1]).reshape(E, 1, 1)

    def tree(kernel: Any) -> Any:
        return {"h_0": {"mlp": {name: {"kernel": kernel}}}}

    stack = orthogonal(tree(g_EIO), 5, MODEL)["h_0"]["mlp"][name]["kernel"]
    each = [orthogonal(tree(g_IO), 5, PLAIN)["h_0"]["mlp"][name]["kernel"] for g_IO in g_EIO]
    np.testing.assert_allclose(stack, jnp.stack(each), atol=1e-6)


def test_muon_of_stacked_layers_of_stacks_equals_muon_of_each_matrix() -> None:
    g_LEIO = jax.random.normal(jax.random.key(0), (2, E, D, F))
    layers = {f"h_{i}": {"mlp": {"up_proj": {"kernel": g_LEIO[i]}}} for i in range(2)}
    expected = orthogonal(layers, 5, MODEL)
    found = orthogonal(stack_layers(layers), 5, ExpertScannedGPT(CONFIG))
    np.testing.assert_allclose(
        found["h"]["mlp"]["up_proj"]["kernel"],
        jnp.stack([expected[f"h_{i}"]["mlp"]["up_proj"]["kernel"] for i in range(2)]),
        atol=1e-6,
    )


class BranchBlock(Block):
    """A block with a matrix in a module whose name ends in h."""

    def residual(self, x_BTD: jax.Array, tokens_BT: jax.Array | None) -> jax.Array:
        return x_BTD + Linear(self.config, self.ops, (D, D), ("embed", "mlp"), False, name="branch")(x_BTD)


class BranchGPT(GPT):
    block = BranchBlock


@pytest.mark.parametrize("name", ["h_0", "h"])
def test_the_name_of_a_module_may_end_in_h(name: str) -> None:
    path = tuple(jax.tree_util.DictKey(key) for key in (name, "branch", "kernel"))
    found = weight_at(path, BranchGPT(CONFIG))
    assert found is not None
    assert found.kind == "matrix"


def test_adapters_of_a_stack_are_an_adapter_of_each_matrix() -> None:
    w_EIO = jax.random.normal(jax.random.key(0), (E, D, F))
    adapters = init_lora(jax.random.key(1), up_proj(w_EIO), 2, ["up_proj"])
    np.testing.assert_array_equal(merge(up_proj(w_EIO), adapters)["h_0"]["mlp"]["up_proj"]["kernel"], w_EIO)
    adapter = adapters["h_0"]["mlp"]["up_proj"]
    assert adapter["a"].shape == (E, D, 2)
    assert adapter["b"]["up_proj"].shape == (E, 2, F)
    assert float(jnp.abs(adapter["a"]).max()) <= 1 / math.sqrt(D)

    changed = jax.tree.map(lambda x: x + 0.1, adapters)
    found = merge(up_proj(w_EIO), changed, alpha=4.0)["h_0"]["mlp"]["up_proj"]["kernel"]
    for e in range(E):
        one = jax.tree.map(lambda x, e=e: x[e], changed)
        expected = merge(up_proj(w_EIO[e]), one, alpha=4.0)["h_0"]["mlp"]["up_proj"]["kernel"]
        np.testing.assert_allclose(found[e], expected, atol=1e-6)


def test_adapters_of_a_stack_are_sharded_like_it() -> None:
    boxed = boxed_trained(MODEL, LoraConfig(rank=2, targets="up_proj,q_proj"))
    adapter = boxed["h_1"]["mlp"]["up_proj"]
    assert adapter["a"].names == ("expert", "embed", "rank")
    assert adapter["b"]["up_proj"].names == ("expert", "rank", "mlp")
    assert boxed["h_1"]["attn"]["q_proj"]["a"].names == ("embed", "rank")


def test_adapters_of_a_matrix_do_not_match_a_stack() -> None:
    adapters = init_lora(jax.random.key(0), up_proj(jnp.zeros((D, F))), 2, ["up_proj"])
    with pytest.raises(UserError, match="adapters do not match the model: up_proj is"):
        merge(up_proj(jnp.zeros((E, D, F))), adapters)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_stored_stack_equals_its_stored_matrices(precision: Any) -> None:
    w_EIO = jax.random.normal(jax.random.key(0), (E, D, F)) * jnp.array([1.0, 10.0, 0.1]).reshape(E, 1, 1)
    x_RI = jax.random.normal(jax.random.key(1), (5, D))
    stack = quantize(up_proj(w_EIO), MODEL, precision)["h_0"]["mlp"]["up_proj"]["kernel"]
    assert isinstance(stack, Stored)
    assert stack.shape == stack.dense().shape == (E, D, F)
    products_ERO = x_RI @ stack
    for e, w_IO in enumerate(w_EIO):
        one = quantize(up_proj(w_IO), PLAIN, precision)["h_0"]["mlp"]["up_proj"]["kernel"]
        assert stack[e].shape == (D, F)
        np.testing.assert_array_equal(stack[e].values_OI, one.values_OI)
        np.testing.assert_array_equal(stack[e].scale_O, one.scale_O)
        np.testing.assert_array_equal(stack.dense()[e], one.dense())
        np.testing.assert_array_equal(products_ERO[e], x_RI @ one)
    assert len(list(stack)) == E


def test_a_model_of_stored_stacks_equals_the_model_of_their_values() -> None:
    params = random_params()
    tokens = random_ids(CONFIG, (2, 6))
    low = quantize(params, MODEL, "int8")
    assert isinstance(low["h_1"]["mlp"]["down_proj"]["kernel"], Stored)
    assert not isinstance(low["h_1"]["mlp"]["down_proj"]["bias"], Stored)
    found = compiled(MODEL, low, tokens)
    np.testing.assert_allclose(found, compiled(MODEL, dequantize(low), tokens), atol=1e-4)


def test_counts_include_every_matrix_of_a_stack() -> None:
    params = abstract_params(MODEL)
    attention = 4 * D * D
    mlp = 2 * E * D * F
    biases = 4 * D + E * (F + D)
    norms = 4 * D
    tables = 17 * D + 16 * D
    assert count_parameters(MODEL) == parameter_count(params) == 2 * (attention + mlp + biases + norms) + tables + 2 * D
    assert multiplied_parameters(MODEL, params) == 2 * (attention + mlp) + 17 * D
    lora = LoraConfig(rank=2, targets="up_proj")
    full = flops_per_token(MODEL, params, 16)
    adapted = flops_per_token(MODEL, params, 16, lora)
    assert full - adapted == 2 * multiplied_parameters(MODEL, params) - 2 * 2 * E * D * F


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, PartitionSpec(("expert",), ("fsdp",), ("tensor",))),
        ({"expert": ("tensor",), "mlp": ()}, PartitionSpec(("tensor",), ("fsdp",), None)),
    ],
    ids=str,
)
def test_a_stack_is_sharded_by_its_logical_axes(rules: Any, expected: PartitionSpec) -> None:
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=1))  # tensor 2 does not divide E
    boxed = jax.eval_shape(lambda: boxed_params(MODEL, 0))
    places = shardings(boxed, CONFIG, mesh, change_rules(rules))
    assert places["h_0"]["mlp"]["up_proj"]["kernel"].spec == expected


def table(*rows: WeightRow) -> Format:
    return Format(rows, "model.", "model.embed.weight")


@pytest.mark.parametrize("name", ["layers.{}.experts.up", "layers.{}.experts.{expert}.up"], ids=["fused", "separate"])
def test_a_stack_is_converted_as_one_tensor_or_one_for_each_matrix(name: str) -> None:
    form = table(WeightRow(name, ("h_{}/mlp/up_proj/kernel",), output_first=True))
    params = random_params()
    tensors = {tensor.name: tensor for tensor in tensors_of(params, MODEL, form)}
    w_EIO = np.asarray(params["h_1"]["mlp"]["up_proj"]["kernel"])
    if "{expert}" in name:
        assert len(tensors) == 2 * E
        np.testing.assert_array_equal(tensors["layers.1.experts.2.up"].read(), w_EIO[2].T)
    else:
        assert len(tensors) == 2
        np.testing.assert_array_equal(tensors["layers.1.experts.up"].read(), w_EIO.swapaxes(1, 2))

    shapes = leaf_shapes(MODEL)
    rows = expand(form.table, MODEL)
    for row in rows:
        assert tensors[row.name].read().shape == tensor_shape(row, shapes)
    leaves = dict(complete_leaves(rows, lambda row: tensors[row.name].read(), shapes))
    assert set(leaves) == {f"h_{layer}/mlp/up_proj/kernel" for layer in (0, 1)}
    np.testing.assert_array_equal(leaves["h_1/mlp/up_proj/kernel"], w_EIO)


def test_a_model_with_stacks_decodes_with_a_cache() -> None:
    params = random_params()
    tokens = random_ids(CONFIG, (2, 12))
    whole = compiled(MODEL, params, tokens)
    first, cache = compiled(MODEL, params, tokens[:, :7], 16, method="prefill")
    second, _ = compiled(MODEL, params, tokens[:, 7:], cache, method="extend")
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-5)
