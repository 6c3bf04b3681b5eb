"""Laws of the train step."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make, random_ids, small

from jaxgpt.config import Config, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.scan import ScannedGPT
from jaxgpt.ops import Ops
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.rows import row_spec
from jaxgpt.parallel.rules import use_mesh
from jaxgpt.train.loss import RowSums, cross_entropy, next_token_loss, split_windows
from jaxgpt.train.step import STEP_METRICS, apply_gradients, gradients, init_state, train_step
from jaxgpt.trainer.build import build
from jaxgpt.trainer.compilation import compile_lowered, compiling
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.states import shardings_of

OTHERS = ("lion", "sgd", "adafactor")
WIDE = {"n_embd": 128}  # smallest width at which Adafactor factors the MLP's second moments


def program(  # type: ignore[no-untyped-def]
    model: str = "gpt2",
    *,
    mesh: MeshConfig | None = None,
    optim: dict | None = None,  # type: ignore[type-arg]
    shape: dict | None = None,  # type: ignore[type-arg]
    **train,
) -> Program:
    dropout = train.pop("dropout", 0.0)
    settings = {"batch_size": 8, "steps": 10} | train
    config = Config(
        model=small(model, **({"block_size": 8, "n_layer": 1, "dropout": dropout} | (shape or {}))),
        optim=OptimConfig(**({"warmup_steps": 2} | (optim or {}))),
        train=TrainConfig(**settings),
        mesh=mesh or MeshConfig(data=1),
    )
    return build(config)


def windows(p: Program, seed: int = 0) -> np.ndarray:
    return np.asarray(random_ids(p.config.model, (p.config.train.batch_size, 9), seed))


@functools.cache
def alone(model: str, steps: int, optimizer: str = "adamw") -> tuple[list[float], object]:
    """The reference run on one device."""
    return train(program(model, optim={"name": optimizer}, shape=WIDE if optimizer == "adafactor" else {}), steps)


def train(p: Program, steps: int) -> tuple[list[float], object]:
    state = p.init()
    losses = []
    for step in range(steps):
        state, metrics = p.step(state, p.put(windows(p, step)))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state)


def test_skipped_updates_do_not_advance_the_learning_rate() -> None:
    p = program("statquest", optim={"not_finite": "skip", "warmup_steps": 9})
    state = p.init()
    rates = []
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.params)
    for params in (None, nan, None):
        good = jax.tree.map(jnp.copy, state.params)
        state, metrics = p.step(state if params is None else state._replace(params=params), p.put(windows(p)))
        state = state if params is None else state._replace(params=good)
        rates.append(float(metrics["lr"]))
    assert rates[0] < rates[1] == rates[2]


def test_loss_equals_the_textbook_formula() -> None:
    logits = jnp.array([[[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]])
    targets = jnp.array([[1, 2]])
    losses = cross_entropy(logits, targets)
    np.testing.assert_allclose(losses[0], [np.log(3), np.log(np.exp([1, 2, 3]).sum()) - 3], rtol=1e-6)
    np.testing.assert_allclose(losses, optax.softmax_cross_entropy_with_integer_labels(logits, targets), rtol=1e-6)


def test_negative_targets_are_ignored() -> None:
    logits = jnp.ones((1, 3, 4))
    targets = jnp.array([[1, -1, 2]])
    assert cross_entropy(logits, targets)[0, 1] == 0
    sums = next_token_loss(lambda *_: logits)({}, jnp.stack([targets, targets, targets], -1), None)
    assert (sums.loss_B[0], sums.count_B[0]) == (cross_entropy(logits, targets).sum(), 2)


def test_padding_does_not_change_an_evaluation() -> None:
    config = small("gpt2", block_size=8, n_layer=1)
    model, params = make(config)
    rows = random_ids(config, (2, 9))
    evaluate = jax.jit(partial(next_token_loss(model.apply), key=None))
    sums = evaluate(params, jnp.concatenate([rows, jnp.full((1, 9), -1)]))
    assert (sums.loss_B[2], sums.count_B[2]) == (0, 0)
    np.testing.assert_allclose(sums.loss_B[:2], evaluate(params, rows).loss_B, rtol=1e-6)


def mean_gradients(
    objective: Any,
    params: Any,
    batch: Any,
    key: jax.Array | None = None,
    accumulation: int = 1,
) -> tuple[dict[str, jax.Array], Any]:
    run = partial(gradients, objective=objective, accumulation=accumulation)
    found: tuple[dict[str, jax.Array], Any] = jax.jit(run)(params, batch, key)
    return found


@pytest.mark.parametrize("total", [1e-30, 1e-3, 0.25, 1.0, 7.0, 1e6])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_mean_is_the_sum_divided_by_any_positive_weight(total: float, accumulation: int) -> None:
    """An objective may weight its tokens; the weights need not add up to 1 or more."""
    weights = np.array([0.1, 0.2, 0.3, 0.4]) * total
    losses = np.array([3.0, 1.0, 0.0, 2.0])

    def objective(params: jax.Array, rows: jax.Array, *_: Any) -> RowSums:
        weight_B = rows[:, 0]
        loss_B = rows[:, 1]
        return RowSums(weight_B * loss_B * params, weight_B, {"weighted": 2 * weight_B})

    rows = jnp.asarray(np.stack([weights, losses], 1), jnp.float32)
    metrics, grad = mean_gradients(objective, jnp.float32(1.5), rows, None, accumulation)
    expected = np.average(losses, weights=weights)
    np.testing.assert_allclose(metrics["loss"], 1.5 * expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["weighted"], 2, rtol=1e-6)
    np.testing.assert_allclose(grad, expected, rtol=1e-6)


def test_a_batch_without_targets_has_no_loss_and_no_gradients() -> None:
    objective = next_token_loss(lambda variables, tokens_BT, *_: variables["params"] * jnp.ones((*tokens_BT.shape, 3)))
    metrics, grad = mean_gradients(objective, jnp.ones(()), jnp.full((2, 9), -1))
    assert (metrics["loss"], grad) == (0, 0)


@pytest.mark.parametrize("name", ["loss", "step", "lr"])
def test_sums_of_an_objective_replace_no_other_metric(name: str) -> None:
    objective = lambda params, x, *_: RowSums(1.0 * (x[:, 0] > 0), jnp.ones(len(x)), {name: x[:, 0]})  # noqa: E731
    p = build(Config(model=small("statquest"), train=TrainConfig(batch_size=8)), objective=objective)
    with pytest.raises(ValueError, match=rf"must not have the names of other metrics: \['{name}'\]"):
        p.lower(p.abstract.state, p.batches.abstract())


def test_microbatches_divide_the_batch() -> None:
    objective = next_token_loss(lambda *_: jnp.zeros(()))
    with pytest.raises(ValueError, match=r"5 rows cannot be split into 2 equal microbatches$"):
        gradients(jnp.ones(()), jnp.zeros((5, 9), jnp.int32), None, objective=objective, accumulation=2)


def test_arguments_that_do_not_match_are_rejected() -> None:
    def objective(w: jax.Array, x: jax.Array, *_: Any) -> RowSums:
        return RowSums(w * x, jnp.ones_like(x))

    state = init_state(jnp.ones(()), optax.sgd(0.1))
    for given in ({"ema_decay": 0.9}, {"spike_factor": 3.0}):
        with pytest.raises(ValueError, match=r": pass (ema|skip)=True to init_state"):
            train_step(state, jnp.ones(2), objective=objective, optimizer=optax.sgd(0.1), **given)


@pytest.mark.parametrize(("data", "accumulation"), [(2, 2), pytest.param(1, 4, marks=pytest.mark.ci)])
def test_an_objective_of_ones_own(data: int, accumulation: int) -> None:
    """A batch may be a tree; the mean of each of the objective's sums is a metric, even with microbatches and devices.

    Pairs of sequences, as preference losses compare them: the rows of both are in one microbatch.
    """
    config = small("statquest", block_size=8, n_layer=1)
    model, params = make(config)
    reference_B = np.random.default_rng(0).normal(size=8).astype(np.float32)
    batch = {"chosen": random_ids(config, (8, 9)), "rejected": random_ids(config, (8, 9), 1), "reference": reference_B}

    def preference(params: Any, batch: Any, key: None, frozen: Any) -> RowSums:
        each = [next_token_loss(model.apply)(params, batch[name], key) for name in ("chosen", "rejected")]
        margin_B = each[1].loss_B - each[0].loss_B - batch["reference"]
        others = {"accuracy": (margin_B > 0).astype(jnp.float32), "margin": margin_B}
        return RowSums(-jax.nn.log_sigmoid(margin_B), jnp.full_like(margin_B, 0.05), others)  # in total 0.4, below 1

    train = TrainConfig(batch_size=8, accumulation=accumulation)
    p = build(Config(model=config, train=train, mesh=MeshConfig(data=data)), optax.sgd(0.1), objective=preference)
    state, metrics = p.step(p.init(params), p.put(batch))
    sums = jax.jit(preference)(params, batch, None, ())
    assert {"loss", "accuracy", "margin", "grad_norm", "grad_squares"} == set(metrics)
    for name, each in {**sums.others, "loss": sums.loss_B}.items():
        np.testing.assert_allclose(metrics[name], each.sum() / 0.4, rtol=1e-5)
    assert 0 < 0.05 * metrics["accuracy"] < 1
    grads = jax.jit(jax.grad(lambda params: preference(params, batch, None, ()).loss_B.sum() / 0.4))(params)
    assert_close(state.params, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads))


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def test_negative_inputs_are_those_of_id_0() -> None:
    """Masked targets are the next inputs. Training and evaluation read them the same way, with padded rows and without."""
    config = small("gpt2", block_size=8, n_layer=1)
    model, params = make(config)
    rows = random_ids(config, (4, 9)).at[:2, :4].set(-1)
    assert split_windows(rows)[0].min() == 0
    objective = next_token_loss(model.apply)
    logits = jax.jit(model.apply)({"params": params}, jnp.maximum(rows[:, :-1], 0))
    expected = cross_entropy(logits, rows[:, 1:]).sum() / (rows[:, 1:] >= 0).sum()
    sums = jax.jit(partial(objective, key=None))(params, rows)
    padded = jnp.concatenate([rows, jnp.full((2, 9), -1)])
    means = [mean_gradients(objective, params, x)[0]["loss"] for x in (rows, padded)]
    for loss in (sums.loss_B.sum() / sums.count_B.sum(), *means):
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["prodigy", "cocob", "adam"])
def test_a_state_can_be_donated_with_any_optimizer(name: str) -> None:
    """Some optimizers keep the weights themselves in their state, or the same array twice."""

    def objective(params: Any, windows: jax.Array, key: None, frozen: Any) -> RowSums:
        losses = (params["a"].sum() * windows[:, :-1] + params["b"] - windows[:, 1:]) ** 2
        return RowSums(losses.sum(-1), jnp.full(len(windows), 4.0))

    optimizer = getattr(optax.contrib if name != "adam" else optax, name)(0.1)
    step = partial(train_step, objective=objective, optimizer=optimizer)
    windows = jnp.arange(10).reshape(2, 5)
    state = init_state({"a": jnp.ones(3), "b": jnp.zeros(())}, optimizer)
    expected = jax.jit(step)(state, windows)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(step, donate_argnums=0)(state, windows), expected)


def test_every_microbatch_draws_its_own_masks() -> None:
    """The mean of many random gradients is near their expectation; the mean of equal gradients would be one of them."""

    def objective(params: jax.Array, rows: jax.Array, key: jax.Array, frozen: Any) -> RowSums:
        losses_B8 = params * jax.random.uniform(key, (len(rows), 8))
        return RowSums(losses_B8.sum(-1), jnp.full(len(rows), 8.0))

    _, grads = mean_gradients(objective, jnp.ones((1, 8)), jnp.ones((64, 9), jnp.int32), jax.random.key(0), 64)
    np.testing.assert_allclose(8 * grads, 0.5, atol=0.15)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("muon", marks=pytest.mark.ci),
        *(pytest.param(n, marks=pytest.mark.long) for n in ("adamw", *OTHERS)),
    ],
)
def test_state_out_has_the_structure_of_state_in(name: str) -> None:
    p = program("modern", optim={"name": name, "ema_decay": 0.9}, accumulation=2, dropout=0.1)
    before = p.init()
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), before)
    after, _ = p.step(before, p.put(windows(p)))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), after) == described
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), p.abstract.state) == described


@pytest.mark.ci
def test_any_optax_transformation_can_replace_the_optimizer() -> None:
    """On a mesh, the optimizer's mask receives plain arrays, and its moments are sharded like the weights."""
    kernels = partial(jax.tree_util.tree_map_with_path, lambda path, _: path[-1].key == "kernel")
    optimizer = optax.chain(optax.masked(optax.scale_by_adam(), kernels), optax.scale(-1e-2))
    p = build(program("modern", mesh=MeshConfig(data=2, fsdp=2)).config, optimizer)
    before = p.init()
    kernel = before.params["h_0"]["mlp"]["up_proj"]["kernel"]
    moments = before.opt_state[0].inner_state
    assert moments.mu["h_0"]["mlp"]["up_proj"]["kernel"].sharding == kernel.sharding != moments.count.sharding
    moved = np.asarray(kernel)
    after, metrics = p.step(before, p.put(windows(p)))
    assert jax.tree.map(lambda leaf: leaf.sharding, after) == shardings_of(p.abstract.state)
    assert not np.array_equal(after.params["h_0"]["mlp"]["up_proj"]["kernel"], moved)
    assert "lr" not in metrics


@pytest.mark.ci
def test_operations_and_model_can_be_replaced() -> None:
    config = program("modern", mesh=MeshConfig(data=2)).config
    expected = alone("modern", 2)[0]
    for given in ({"ops": Ops()}, {"model": GPT(config.model)}):
        np.testing.assert_allclose(train(build(config, **given), 2)[0], expected, rtol=1e-5)  # type: ignore[arg-type]
    config = replace(config, train=replace(config.train, scan_layers=True))
    scanned = build(config, model=ScannedGPT(config.model))
    np.testing.assert_allclose(train(scanned, 2)[0], expected, rtol=1e-5)
    with pytest.raises(UserError, match="scan_layers needs a ScannedGPT"):
        build(config, model=GPT(config.model))


def compiled(p: Program) -> str:
    """Return the HLO text of the compiled step, or of several steps per call."""
    return p.lower(p.abstract.state, p.batches.put_for_call([windows(p)])).compile().as_text()


@pytest.mark.ci
@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.long)])
def test_every_leaf_of_the_state_is_updated_in_place(optimizer: str, each: int) -> None:
    p = program(optim={"name": optimizer, "ema_decay": 0.9}, steps_per_call=each)
    header = compiled(p).split("\n", 1)[0]
    aliased = {int(parameter) for parameter in re.findall(r"\{[\d, ]*\}: \((\d+), \{\}", header)}
    assert aliased == set(range(len(jax.tree.leaves(p.abstract.state))))


@pytest.mark.ci
def test_one_program_for_all_steps_takes_the_memory_of_the_state() -> None:
    p = program(dropout=0.1)
    state = p.init()
    for _ in range(3):
        leaf = state.params["wte"]["embedding"]
        state, _ = p.step(state, p.put(windows(p)))
        assert leaf.is_deleted()
    assert p.jitted.step._cache_size() == 1


@pytest.mark.parametrize("n", [0, 3])
def test_a_call_takes_at_most_steps_per_call_batches(n: int) -> None:
    p = program(steps_per_call=2)
    with pytest.raises(UserError, match=f"expected 1 to 2 batches .*, not {n}"):
        p.batches.put_for_call([windows(p)] * n)


def test_compiler_errors_come_with_advice() -> None:
    p = program(accumulation=2)
    for said, advice in (
        (
            "INTERNAL: RET_CHECK failure\n 8 % 6 == 0",
            "mesh data 1 x fsdp 1 x expert 1 x context 1 x tensor 1.*; try mesh sizes",
        ),
        ("RESOURCE_EXHAUSTED: Out of memory", r"out of device memory \(.*; raise --train.accumulation"),
        (f"INTERNAL: {'x' * 400} RESOURCE_EXHAUSTED", r"out of device memory \(.*; raise --train.accumulation"),
    ):
        refused = Mock(**{"compile.side_effect": jax.errors.JaxRuntimeError(said)})
        with pytest.raises(UserError, match=advice):
            compile_lowered(p, refused)


@pytest.mark.ci
@pytest.mark.parametrize("each", [3, 1])
def test_the_step_is_compiled_during_initialization(each: int) -> None:
    """The first step, and calls of several steps, reuse the program that another thread compiled from abstract arrays."""
    p = program(mesh=MeshConfig(data=2), steps_per_call=each)
    listener = Mock()
    with compiling(p, SimpleNamespace(spec=row_spec(windows(p))), listener):
        state = p.init()
    assert [call.args for call in listener.stage.call_args_list] == [("compiling",), ("",)]
    listener.compiled.assert_called_once()
    batches = [p.batches.put_for_call([windows(p)] * n) for n in (1, each)]
    seen: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        state, _ = p.step(state, batches[0])
        state, _ = p.step(state, batches[1])
        assert int(state.step) == 1 + each
        assert not [event for event in seen if "backend_compile" in event]
        jax.jit(lambda x: x + 41)(1.0)
        assert [event for event in seen if "backend_compile" in event]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.long
def test_initial_weights_do_not_depend_on_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = program().init().params
    monkeypatch.setattr("jaxgpt.trainer.states.quick_compile_options", lambda mesh: None)
    jax.tree.map(np.testing.assert_array_equal, cheap, program().init().params)


def test_no_random_key_is_used_twice() -> None:
    """JAX's check for reused keys finds none in the initial weights and in a step."""
    p = program("torch", dropout=0.5, accumulation=2)
    with jax.debug_key_reuse(True):
        jax.eval_shape(p.fresh, 0)
        jax.eval_shape(jax.jit(p.pure_step), p.abstract.state, p.batches.abstract())


@pytest.mark.ci
def test_dropout_masks_are_a_function_of_seed_and_step() -> None:
    losses = [train(program("statquest", dropout=0.5, seed=seed), 3)[0] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    # One batch and a tiny learning rate: only the masks differ.
    p = program("statquest", dropout=0.5, optim={"learning_rate": 1e-12, "min_lr": 0.0})
    state = p.init()
    seen = []
    for _ in range(2):
        state, metrics = p.step(state, p.put(windows(p)))
        seen.append(float(metrics["loss"]))
    assert seen[0] != seen[1]
    streams = [
        named_key(1, "dropout", 0),
        named_key(1, "dropout", 1),
        named_key(1, "init", 0),
        named_key(2, "dropout", 0),
    ]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in streams}) == 4


@pytest.mark.ci
def test_weight_average() -> None:
    p = program(optim={"ema_decay": 0.75})
    state = p.init()
    first = jax.device_get(state.params["wte"]["embedding"])
    state, _ = p.step(state, p.put(windows(p)))
    expected = 0.75 * first + 0.25 * state.params["wte"]["embedding"]
    np.testing.assert_allclose(state.ema["wte"]["embedding"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("muon", marks=pytest.mark.ci),  # and AdamW for all other weights
        *(pytest.param(name, marks=pytest.mark.long) for name in ("adamw", *OTHERS)),
    ],
)
def test_losses_do_not_depend_on_the_mesh(name: str) -> None:
    """By default, test_equal_steps.py tests one step of SGD, and test_optimizer.py Muon's matrices on a mesh."""
    losses, state = alone("modern", 3, name)
    shape = WIDE if name == "adafactor" else {}
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    split, state_split = train(program("modern", mesh=mesh, optim={"name": name}, shape=shape), 3)
    np.testing.assert_allclose(split, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state_split), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 if name == "muon" else 2e-4)


@pytest.mark.parametrize(
    ("K", "tensor"),
    [(2, 4), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 4), (4, 4), (2, 2)))],
)
@pytest.mark.parametrize(
    "name", ["statquest", pytest.param("gpt2", marks=pytest.mark.ci), pytest.param("llama", marks=pytest.mark.long)]
)
def test_losses_do_not_depend_on_the_mesh_with_few_key_heads(name: str, K: int, tensor: int) -> None:
    """If the mesh does not divide the key heads, every device has all keys and values, even if it divides their width."""
    shape = {"n_head": 4, "n_kv_head": K, "n_embd": 32}
    expected, _ = train(program(name, shape=shape), 3)
    p = program(name, mesh=MeshConfig(data=1, tensor=tensor), shape=shape)
    losses, _ = train(p, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    attn = p.abstract.state.params["h_0"]["attn"]
    kernels = {q: attn[f"{q}_proj"]["kernel"] for q in "qkv"}
    parts = {q: w.shape[1] // w.sharding.shard_shape(w.shape)[1] for q, w in kernels.items()}
    of_keys = tensor if K % tensor == 0 else 1
    assert parts == {"q": tensor, "k": of_keys, "v": of_keys}


def test_a_mesh_that_does_not_divide_the_heads_is_refused() -> None:
    """It is rejected although it divides the total width of the heads."""
    with pytest.raises(UserError, match=r"mesh\.tensor 4 does not divide model\.n_head 6"):
        program(mesh=MeshConfig(data=1, tensor=4), shape={"n_head": 6, "n_embd": 24, "head_dim": 4})


def test_learning_rates_and_weight_decay_are_arguments_of_the_program() -> None:
    """A different value needs no compilation: the program is the same."""
    texts = [
        p.lower(p.abstract.state, p.batches.abstract()).as_text()
        for p in (
            program(optim=optim) for optim in ({}, {"learning_rate": 3e-3, "weight_decay": 0.3, "grad_clip": 2.0})
        )
    ]
    assert texts[0] == texts[1]


def collectives(text: str) -> Counter[str]:
    return Counter(
        re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    )


@pytest.mark.ci
def test_collectives_follow_the_mesh() -> None:
    """data: one sum of gradients; fsdp: weights are gathered and gradients summed."""
    assert set(collectives(compiled(program(mesh=MeshConfig(data=4))))) == {"all-reduce"}
    fsdp = collectives(compiled(program(mesh=MeshConfig(data=1, fsdp=4))))
    assert fsdp["all-gather"] >= 6, "every kernel of the block"
    assert fsdp["all-reduce"] + fsdp["reduce-scatter"]


def test_embedding_lookup_gathers_no_whole_batch() -> None:
    p = program("llama", mesh=MeshConfig(data=2, fsdp=2), shape={"vocab_size": 512, "n_layer": 1})
    text = compiled(p)
    assert "all-gather" in text
    train = p.config.train
    model = p.config.model
    assert f"f32[{train.batch_size},{model.block_size},{model.n_embd}]" not in text


def test_tensor_parallel_blocks_sum_twice() -> None:
    """The forward pass sums after attention and after the MLP (Shoeybi et al. 2019, section 3)."""

    def forward(n_layer: int) -> Counter[str]:
        p = program(mesh=MeshConfig(data=1, tensor=4), shape={"n_layer": n_layer})
        params = p.abstract.state.params
        with use_mesh(p.mesh, p.config.model):
            return collectives(p.jitted.sums.lower(params, p.put(windows(p)), p.frozen).compile().as_text())

    assert forward(2) - forward(1) == Counter({"all-reduce": 2})


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_devices_of_a_cpu_add_small_gradients_as_one_array(optimizer: str) -> None:
    text = compiled(program(mesh=MeshConfig(data=2), optim={"name": optimizer}))
    [sent] = re.findall(r" = (.*) all-reduce\(", text)
    assert len(re.findall(r"\w+\[", sent)) == 1


def test_weights_and_moments_are_sharded() -> None:
    p = program("gpt2", mesh=MeshConfig(data=1, fsdp=4, tensor=2))
    state = p.init()

    def share(tree: object) -> float:
        leaves = jax.tree.leaves(tree)
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)

    # Kernels are divided among 8 devices; the 17 rows of the table, norms and biases are not, or less.
    assert share(state.params) < 0.25
    assert share(state.opt_state) < 0.25
    kernel = state.params["h_0"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (kernel.shape[0] // 4, kernel.shape[1] // 2)


def test_training_starts_from_given_weights() -> None:
    p = program()
    _, params = make(p.config.model, seed=5)
    state = p.init(params)
    assert (state.params["wte"]["embedding"] == params["wte"]["embedding"]).all()


def test_an_update_keeps_the_metrics_that_it_receives() -> None:
    """The caller may use its metrics again: the update returns new metrics."""
    received = {"loss": jnp.float32(1.0)}

    def update() -> dict[str, jax.Array]:
        params = {"w": jnp.ones(2)}
        optimizer = optax.sgd(0.1)
        state = init_state(params, optimizer, skip=True)
        _, metrics = apply_gradients(state, params, received, optimizer=optimizer)
        return metrics

    metrics = jax.eval_shape(update)
    assert set(received) == {"loss"}
    assert set(metrics) == set(STEP_METRICS)
