"""Blocks, attention and MLP of a subclass: trained, decoded, described by the table of weights, sharded and planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compiled, make, small

import jaxgpt
from jaxgpt.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.model import GPT
from jaxgpt.model.attention import Attention
from jaxgpt.model.gpt import Block
from jaxgpt.model.init import init_params
from jaxgpt.model.mlp import MLP
from jaxgpt.model.params import weights
from jaxgpt.model.scan import ScannedGPT, stack_layers
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Visible, row_positions
from jaxgpt.train.optimizer import muon_labels

CONFIG = small("gpt2", block_size=16)
TOKENS = np.random.default_rng(0).integers(0, 17, (2, 12))


class ValueEmbedding(Attention):
    """Adds a scaled vector of each token to its value."""

    def values(self, x_BTD: jax.Array, tokens_BT: jax.Array | None) -> jax.Array:
        c = self.config
        shape = c.vocab_size, c.kv_heads * c.head_width
        table = self.weight("value_table", nn.initializers.normal(0.5), shape, ("vocab", None))
        assert tokens_BT is not None
        v_BTKH = super().values(x_BTD, tokens_BT)
        return v_BTKH + table.take(tokens_BT, axis=0).reshape(v_BTKH.shape)


class WideMLP(MLP):
    """Multiplies the result of the MLP."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return 2 * super().__call__(x_BTD)


class OwnBlock(Block):
    attention = ValueEmbedding
    mlp = WideMLP

    def residual(self, x_BTD: jax.Array, tokens_BT: jax.Array | None) -> jax.Array:
        return x_BTD * self.weight("scale", nn.initializers.constant(1.5), (1, 1, 1), (None, None, None))


class OwnGPT(GPT):
    block = OwnBlock


class OwnScannedGPT(ScannedGPT):
    block = OwnBlock


def program_of(steps_mesh: MeshConfig, model: GPT, **optim: Any) -> Any:
    config = Config(
        model=model.config,
        optim=OptimConfig(warmup_steps=0, **optim),
        train=TrainConfig(batch_size=4, steps=20),
        mesh=steps_mesh,
    )
    return jaxgpt.build(config, model=model)


def test_a_block_composes_with_defaults() -> None:
    _, params = make(CONFIG)
    x_BTD = jnp.ones((1, 4, CONFIG.n_embd))
    y_BTD, _, sides = compiled(Block(CONFIG, Ops()), params["h_0"], x_BTD, Visible(row_positions(4)))
    assert y_BTD.shape == x_BTD.shape
    assert sides == {}


def test_the_parts_of_a_subclass_change_the_logits() -> None:
    params = init_params(OwnGPT(CONFIG))
    assert params["h_1"]["attn"]["value_table"].shape == (17, 16)
    own = compiled(OwnGPT(CONFIG), params, TOKENS)
    plain = compiled(GPT(CONFIG), params, TOKENS)
    assert np.abs(np.asarray(own) - plain).max() > 0.1


def test_prefill_and_extend_equal_the_whole_text() -> None:
    model = OwnGPT(CONFIG)
    params = init_params(model)
    whole = compiled(model, params, TOKENS)
    first, cache = compiled(model, params, TOKENS[:, :7], 16, method="prefill")
    second, _ = compiled(model, params, TOKENS[:, 7:], cache, method="extend")
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-5)


def test_scanned_layers_compute_the_same() -> None:
    params = init_params(OwnGPT(CONFIG))
    scanned = compiled(OwnScannedGPT(CONFIG), stack_layers(params), TOKENS)
    np.testing.assert_allclose(scanned, compiled(OwnGPT(CONFIG), params, TOKENS), atol=1e-5)


def test_the_table_of_weights_describes_the_weights_of_the_subclass() -> None:
    table = weights(OwnGPT(CONFIG))
    assert table["h_1/attn/value_table"].kind == "table"
    assert table["h_0/scale"].axes == (None, None, None)
    assert table.keys() - weights(CONFIG).keys() == {
        f"h_{layer}/{name}" for layer in (0, 1) for name in ("attn/value_table", "scale")
    }


def test_an_own_matrix_is_trained_by_muon() -> None:
    class Extra(MLP):
        @nn.compact
        def __call__(self, x_BTD: jax.Array) -> jax.Array:
            width = self.config.n_embd
            extra = self.weight("extra", nn.initializers.normal(0.02), (width, width), ("embed", None))
            return x_BTD @ extra

    class Blocks(Block):
        mlp = Extra

    class Model(GPT):
        block = Blocks

    model = Model(CONFIG)
    labels = muon_labels(init_params(model), model)
    assert labels["h_0"]["mlp"]["extra"] == "muon"
    program = program_of(MeshConfig(data=1), model, name="muon")
    state = program.init()
    before = np.asarray(state.params["h_0"]["mlp"]["extra"])
    state, _ = program.step(state, program.put(np.random.default_rng(1).integers(0, 17, (4, 17))))
    change = np.asarray(state.params["h_0"]["mlp"]["extra"]) - before
    singular = np.linalg.svd(change, compute_uv=False)
    assert singular.max() / np.median(singular) < 2  # orthogonalized


@pytest.mark.parametrize("mesh", [MeshConfig(data=1), MeshConfig(data=1, fsdp=2, tensor=2)], ids=str)
def test_a_subclass_trains_on_a_mesh(mesh: MeshConfig) -> None:
    program = program_of(mesh, OwnGPT(CONFIG), learning_rate=1e-2)
    state = program.init()
    batch = program.put(np.tile(np.arange(17), (4, 1)))
    losses = []
    for _ in range(20):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 2
    if mesh.fsdp > 1:
        assert not state.params["h_0"]["mlp"]["up_proj"]["kernel"].sharding.is_fully_replicated


def test_an_unknown_logical_axis_raises_one_line() -> None:
    class Wrong(MLP):
        @nn.compact
        def __call__(self, x_BTD: jax.Array) -> jax.Array:
            gain = self.weight("gain", nn.initializers.ones, (self.config.n_embd,), ("embedd",))
            return x_BTD * gain.reshape(1, 1, -1)

    class Blocks(Block):
        mlp = Wrong

    class Model(GPT):
        block = Blocks

    with pytest.raises(UserError, match=r"no rule for the logical axis 'embedd'.*did you mean.*embed"):
        program_of(MeshConfig(data=1), Model(CONFIG))


# Optimizer state of other shapes than its weights.


def with_factors(boxed: bool = False) -> optax.GradientTransformation:
    """Return an optimizer that stores the product G G^T of each matrix, as Shampoo and SOAP do."""

    def factor(x: jax.Array) -> Any:
        if x.ndim < 2:
            return jnp.zeros_like(x)
        zeros = jnp.zeros((x.shape[0], x.shape[0]), x.dtype)
        return nn.Partitioned(zeros, names=("embed", None)) if boxed else zeros

    def init(params: Any) -> Any:
        return {"factors": jax.tree.map(factor, params), "count": jnp.zeros((), jnp.int32)}

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def add(total: jax.Array, g: jax.Array) -> jax.Array:
            return total + (g @ g.T if g.ndim > 1 else g)

        factors = jax.tree.map(add, state["factors"], grads)
        return jax.tree.map(lambda g: -0.1 * g, grads), {"factors": factors, "count": state["count"] + 1}

    return optax.GradientTransformation(init, update)


def wide(**mesh: int) -> Config:
    model = ModelConfig(vocab_size=16, block_size=8, n_layer=1, n_head=4, n_embd=320)
    return Config(model=model, train=TrainConfig(batch_size=4), mesh=MeshConfig(**{"data": 1, **mesh}))


def held(tree: Any) -> float:
    """Return the largest share of a tree's bytes on one device."""
    leaves = jax.tree.leaves(tree)
    total = sum(leaf.nbytes for leaf in leaves)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / total


def test_state_of_another_shape_is_sharded_along_its_largest_axis() -> None:
    program = jaxgpt.build(wide(fsdp=4, tensor=2), optimizer=with_factors())
    state = program.init()
    assert held(state.opt_state) < 1.2 / 8
    assert "of the optimizer state" not in program.note
    state, _ = program.step(state, program.put(np.zeros((4, 9), np.int32)))
    assert held(state.opt_state) < 1.2 / 8


def test_boxes_of_the_optimizer_place_its_state() -> None:
    config = wide(fsdp=4)
    program = jaxgpt.build(config, optimizer=with_factors(boxed=True))
    state = program.init()
    factor = state.opt_state["factors"]["h_0"]["mlp"]["down_proj"]["kernel"]
    assert factor.sharding.spec == jax.sharding.PartitionSpec(("fsdp",), None)
    state, _ = program.step(state, program.put(np.zeros((4, 9), np.int32)))
    alone = jaxgpt.build(replace(config, mesh=MeshConfig(data=1)), optimizer=with_factors())
    expected, _ = alone.step(alone.init(), alone.put(np.zeros((4, 9), np.int32)))
    found = state.opt_state["factors"]["h_0"]["mlp"]["down_proj"]["kernel"]
    np.testing.assert_allclose(found, expected.opt_state["factors"]["h_0"]["mlp"]["down_proj"]["kernel"], atol=1e-5)


def test_a_replicated_optimizer_state_is_noted() -> None:
    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((257, 257)), params)

    optimizer = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    program = jaxgpt.build(wide(fsdp=4), optimizer=optimizer)
    assert "100% of the optimizer state is replicated on every device: neither fsdp nor tensor divides" in program.note


def test_an_optimizer_state_that_could_be_sharded_is_noted_with_the_way() -> None:
    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((8, 8)), params)

    optimizer = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    program = jaxgpt.build(wide(fsdp=4), optimizer=optimizer)
    assert "100% of the optimizer state is replicated on every device: to shard it, return its arrays" in program.note


def test_an_optimizer_state_that_the_mesh_does_not_divide_is_named() -> None:
    def init(params: Any) -> Any:
        return {"factor": nn.Partitioned(jnp.zeros((30, 30)), names=("embed", None))}

    optimizer = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    with pytest.raises(UserError, match=r"factor has a dimension embed of 30, which fsdp = 4 does not divide"):
        jaxgpt.build(wide(fsdp=4), optimizer=optimizer)


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((16, 33), ("embed", "mlp"), r"h_0/mlp/a has a dimension mlp of 33, which tensor = 2 does not divide"),
        ((16, 32), ("embed",), r"h_0/mlp/a has 2 dimensions and the logical axes \('embed',\): use one name or None"),
        ((16, 32), ("fsdp", None), r"no rule for the logical axis 'fsdp'.*such as embed, not an axis of the mesh"),
    ],
)
def test_a_weight_that_cannot_be_sharded_is_named(shape: Any, axes: Any, message: str) -> None:
    class Wrong(MLP):
        @nn.compact
        def __call__(self, x_BTD: jax.Array) -> jax.Array:
            a = self.weight("a", nn.initializers.ones, shape, axes)
            return x_BTD + (x_BTD @ a).sum(-1, keepdims=True)

    class Blocks(Block):
        mlp = Wrong

    class Model(GPT):
        block = Blocks

    with pytest.raises(UserError, match=message):
        program_of(MeshConfig(data=1, tensor=2), Model(CONFIG))


# A trained model of a subclass in the hand.


def own_lm() -> LM:
    params = jax.tree.map(lambda x: x, init_params(OwnGPT(CONFIG), 3))
    return LM(Config(model=CONFIG), params, make_tokenizer("ids", "", 0, 17), model=OwnGPT)


def test_generate_score_and_study_use_the_class_of_the_model() -> None:
    lm = own_lm()
    logits_BTV = compiled(OwnGPT(CONFIG), lm.params, TOKENS[:1])
    [out] = jaxgpt.generate(lm, TOKENS[:1], max_new_tokens=3, temperature=0)
    assert out.ids[0] == int(logits_BTV[0, -1].argmax())
    [score] = jaxgpt.score(lm, TOKENS[:1].tolist(), [out.ids])
    np.testing.assert_allclose(score.log_p, out.log_p, atol=1e-5)
    np.testing.assert_allclose(jaxgpt.study.run(lm, TOKENS[:1]).logits, logits_BTV, atol=1e-5)


def test_weights_of_a_subclass_are_never_ignored() -> None:
    lm = own_lm()._replace(model=GPT)
    for call in (
        lambda: jaxgpt.generate(lm, "1"),
        lambda: jaxgpt.study.run(lm, TOKENS),
        lambda: jaxgpt.score(lm, "1", "2"),
    ):
        with pytest.raises(UserError, match="GPT has no weight h_0/attn/value_table, so it would be ignored"):
            call()


def test_a_saved_model_needs_its_class() -> None:
    lm = own_lm()
    jaxgpt.save(lm, "own")
    same = jaxgpt.load("own", model=OwnGPT)
    np.testing.assert_array_equal(same.params["h_1"]["attn"]["value_table"], lm.params["h_1"]["attn"]["value_table"])
    with pytest.raises(UserError, match="value_table"):
        jaxgpt.load("own")
