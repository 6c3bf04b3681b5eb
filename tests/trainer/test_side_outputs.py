"""Side outputs of blocks: metrics and penalties of the objective, equal in every layout of layers, rows and devices."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import Experts
from helpers import compiled, make, packed_rows, random_ids, small

import jaxgpt
from jaxgpt.config import Config, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.kernels.remat import POLICIES
from jaxgpt.lm import LM
from jaxgpt.model import GPT
from jaxgpt.model.gpt import Block, SideOutputs
from jaxgpt.model.init import init_params
from jaxgpt.model.scan import ScannedGPT, unstack_layers
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Positions
from jaxgpt.parallel.sums import sums_by_device
from jaxgpt.train.loss import next_token_loss
from jaxgpt.train.side_outputs import side_sums
from jaxgpt.train.step import gradient_sums

CONFIG = small("gpt2", block_size=16)
FACTOR = 0.5


class QuietBlock(Block):
    """A block with two side outputs: a value of each token, and a value of each row."""

    def feed_forward(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, SideOutputs]:
        out_BTD, _ = super().feed_forward(x_BTD, positions)
        square_BT = jnp.square(out_BTD.astype(jnp.float32)).mean(-1)
        return out_BTD, {"square": square_BT, "largest": square_BT.max(-1, keepdims=True)}


class QuietGPT(GPT):
    block = QuietBlock


class QuietExpertBlock(QuietBlock):
    """A block whose MLP has stacks of weights, `[E, in, out]`."""

    mlp = Experts


class QuietExpertGPT(GPT):
    block = QuietExpertBlock


class QuietExpertScannedGPT(ScannedGPT):
    block = QuietExpertBlock


class NoisyBlock(Block):
    """A block that replaces `__call__`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y_BTD, kv, sides = super().__call__(*args, **kwargs)
        return y_BTD, kv, {**sides, "stream": jnp.abs(y_BTD).mean(-1)}


class NoisyGPT(GPT):
    block = NoisyBlock


PENALTIES = {"square": FACTOR, "largest": 0.1}


@functools.cache
def three_steps(
    scan: bool = False,
    remat: Any = "none",
    accumulation: int = 1,
    chunk: int = 0,
    rows: int = 4,
    optimizer: Any = "sgd",
    **mesh: int,
) -> tuple[list[dict[str, float]], Any]:
    """Train on packed rows; return the scalar metrics of each step, and the weights."""
    config = Config(
        model=CONFIG,
        optim=OptimConfig(name=optimizer, warmup_steps=0, learning_rate=1e-2, min_lr=0.0),
        train=TrainConfig(
            batch_size=rows, steps=3, accumulation=accumulation, scan_layers=scan, remat=remat, loss_chunk=chunk
        ),
        mesh=MeshConfig(**{"data": 1, **mesh}),
    )
    gpt = QuietExpertScannedGPT if scan else QuietExpertGPT
    model = gpt(CONFIG, Ops(), POLICIES[remat])
    program = jaxgpt.build(config, model=model, objective=next_token_loss(model.apply, chunk, PENALTIES))
    state = program.init()
    metrics = []
    for step in range(3):
        state, found = program.step(state, program.put(packed_rows(CONFIG, rows, step)))
        metrics.append({name: float(found[name]) for name in ("loss", "grad_norm", "square", "largest")})
    params = unstack_layers(state.params, CONFIG.n_layer) if scan else state.params
    return metrics, jax.device_get(params)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"scan": True}, marks=pytest.mark.long),
        pytest.param({"remat": "full"}, marks=pytest.mark.long),
        {"remat": "dots", "chunk": 5},
        {"scan": True, "remat": "full", "accumulation": 2},
        {"accumulation": 2, "data": 2},
        pytest.param({"fsdp": 2}, marks=pytest.mark.long),
        {"tensor": 2, "scan": True, "remat": "dots"},
        {"fsdp": 2, "tensor": 2, "accumulation": 2},
    ],
    ids=str,
)
def test_the_layout_of_a_run_does_not_change_its_side_outputs(layout: dict[str, Any]) -> None:
    expected, weights = three_steps()
    found, params = three_steps(**layout)
    for step, metrics in enumerate(found):
        for name, value in metrics.items():
            np.testing.assert_allclose(value, expected[step][name], rtol=2e-5, err_msg=f"{name} of step {step}")
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_muon_of_stacks_does_not_depend_on_the_layout() -> None:
    expected, _ = three_steps(optimizer="muon")
    found, _ = three_steps(optimizer="muon", scan=True, fsdp=2, tensor=2)
    for name, value in found[-1].items():
        np.testing.assert_allclose(value, expected[-1][name], rtol=1e-4, err_msg=name)


def test_padded_rows_count_nothing() -> None:
    """Three rows on two devices, in two microbatches, are padded with a row of -1."""
    expected, _ = three_steps(rows=3)
    found, _ = three_steps(rows=3, data=2, accumulation=2)
    for name, value in found[0].items():
        np.testing.assert_allclose(value, expected[0][name], rtol=2e-5, err_msg=name)


def test_side_outputs_of_a_packed_row_equal_those_of_its_documents() -> None:
    model = QuietGPT(CONFIG)
    params = make(CONFIG)[1]
    objective = jax.jit(partial(next_token_loss(model.apply, penalties={"square": FACTOR}), key=None))
    packed = packed_rows(CONFIG, 1, 0)
    documents = [np.where((packed[..., 2:] == document), packed, -1) for document in (0, 1)]
    together = objective(params, jnp.asarray(packed))
    apart = [objective(params, jnp.asarray(document)) for document in documents]
    assert float(together.count_B[0]) == 10
    assert together.penalty_B is not None
    for name, value_B, parts in (
        ("loss", together.loss_B, [sums.loss_B for sums in apart]),
        ("square", together.others["square"], [sums.others["square"] for sums in apart]),
        ("penalty", together.penalty_B / FACTOR, [sums.others["square"] for sums in apart]),
    ):
        np.testing.assert_allclose(value_B, sum(parts), rtol=1e-5, err_msg=name)


def test_a_value_of_a_row_counts_once_per_target() -> None:
    targets_BT = jnp.array([[3, -1, 4], [-1, -1, -1]])
    sums = side_sums({"row": jnp.array([[2.0], [jnp.nan]]), "token": jnp.arange(6.0).reshape(2, 3)}, targets_BT)
    np.testing.assert_array_equal(sums["row"], [4, 0])
    np.testing.assert_array_equal(sums["token"], [2, 0])


def test_an_array_of_a_row_keeps_its_axes() -> None:
    array_B1LE = jnp.arange(12.0).reshape(2, 1, 3, 2)
    sums = side_sums({"load": array_B1LE}, jnp.array([[3, -1, 4], [-1, -1, -1]]))
    np.testing.assert_array_equal(sums["load"][0], 2 * array_B1LE[0, 0])
    np.testing.assert_array_equal(sums["load"][1], jnp.zeros((3, 2)))


def test_a_penalty_adds_its_gradient() -> None:
    model, params = QuietGPT(CONFIG), make(CONFIG)[1]
    windows = random_ids(CONFIG, (2, 17))
    plain = next_token_loss(model.apply, penalties={})
    penalized = next_token_loss(model.apply, penalties={"square": FACTOR})

    def by_hand(params: Any) -> jax.Array:
        sums = plain(params, windows, None)
        return sums.loss_B.sum() + FACTOR * sums.others["square"].sum()

    @jax.jit
    def compute(params: Any) -> Any:
        found = gradient_sums(params, windows, None, objective=penalized)
        return found, jax.grad(by_hand)(params), plain(params, windows, None).loss_B.sum()

    (grads, (loss, count, others)), expected, plain_loss = compute(params)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert set(others) == {"square", "largest"}
    np.testing.assert_array_equal(loss, plain_loss)
    assert float(count) == 32


def test_a_program_reports_side_outputs_without_a_penalty() -> None:
    config = Config(model=CONFIG, train=TrainConfig(batch_size=2), mesh=MeshConfig(data=1))
    batch = np.asarray(random_ids(CONFIG, (2, 17)))
    losses = []
    for model in (QuietGPT(CONFIG), GPT(CONFIG)):
        program = jaxgpt.build(config, model=model)
        state = program.init()
        sums = program.sums(state.params, program.put(batch))
        _, metrics = program.step(state, program.put(batch))
        losses.append((float(metrics["loss"]), float(sums.loss_B.sum())))
        assert ("square" in metrics) == (type(model) is QuietGPT)
    assert losses[0] == losses[1]


def test_sums_by_device_add_side_outputs_and_penalties() -> None:
    model, params = QuietGPT(CONFIG), make(CONFIG)[1]
    objective = next_token_loss(model.apply, penalties=PENALTIES)
    windows = random_ids(CONFIG, (4, 17))
    expected = jax.jit(partial(gradient_sums, objective=objective))(params, windows, None)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        found = jax.jit(partial(sums_by_device, objective=objective, accumulation=2))(params, windows, None)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_block_may_add_side_outputs_in_its_call() -> None:
    model, params = NoisyGPT(CONFIG), make(CONFIG)[1]
    assert jax.tree.structure(init_params(model)) == jax.tree.structure(params)
    tokens = random_ids(CONFIG, (2, 12))
    x_BTD, sides = compiled(model, params, tokens, method="hidden_and_sides")
    assert x_BTD.shape == (2, 12, CONFIG.n_embd)
    assert sides["stream"].shape == (2, 12)


def test_a_penalty_without_side_output_raises_one_line() -> None:
    objective = next_token_loss(QuietGPT(CONFIG).apply, penalties={"squares": 1.0})
    with pytest.raises(
        ValueError, match=r"no side output 'squares' for a penalty.*did you mean square.*use largest, square"
    ):
        jax.eval_shape(objective, make(CONFIG)[1], random_ids(CONFIG, (2, 17)), None)


def test_a_side_output_of_another_shape_raises_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"side output square has shape \(2,\); expected \(2, 3\), or \(2, 1\) for rows"
    ):
        side_sums({"square": jnp.ones(2)}, jnp.zeros((2, 3), jnp.int32))


def test_a_side_output_named_like_a_metric_raises_one_line() -> None:
    class LossBlock(Block):
        def feed_forward(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, SideOutputs]:
            out_BTD, _ = super().feed_forward(x_BTD, positions)
            return out_BTD, {"loss": out_BTD.mean(-1)}

    class LossGPT(GPT):
        block = LossBlock

    program = jaxgpt.build(Config(model=CONFIG, train=TrainConfig(batch_size=2)), model=LossGPT(CONFIG))
    with pytest.raises(ValueError, match="must not have the names of other metrics"):
        program.lower(program.abstract.state, program.batches.abstract())


def test_a_model_with_side_outputs_decodes_with_a_cache() -> None:
    model, params = QuietGPT(CONFIG), make(CONFIG)[1]
    tokens = random_ids(CONFIG, (2, 12))
    whole = compiled(model, params, tokens)
    first, cache = compiled(model, params, tokens[:, :7], 16, method="prefill")
    second, _ = compiled(model, params, tokens[:, 7:], cache, method="extend")
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-5)
    np.testing.assert_array_equal(whole, compiled(GPT(CONFIG), params, tokens))


def test_a_model_with_side_outputs_generates_text() -> None:
    lm = LM(Config(model=CONFIG), make(CONFIG)[1], make_tokenizer("ids", "", 0, CONFIG.vocab_size), model=QuietGPT)
    tokens = np.asarray(random_ids(CONFIG, (1, 5)))
    [expected] = jaxgpt.generate(replace_model(lm), tokens, max_new_tokens=4, temperature=0)
    [out] = jaxgpt.generate(lm, tokens, max_new_tokens=4, temperature=0)
    assert out.ids == expected.ids


def replace_model(lm: LM) -> LM:
    return lm._replace(model=GPT, config=replace(lm.config))
