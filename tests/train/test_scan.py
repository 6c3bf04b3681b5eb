"""Scanned layers equal unrolled layers: outputs, training and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import compiled, make, random_ids, small

from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.saver import Saver
from jaxgpt.config import Config, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.model.params import abstract_params
from jaxgpt.model.scan import ScannedGPT, stack_layers, unstack_layers
from jaxgpt.train.optimizer import decay_mask, make_optimizer
from jaxgpt.trainer.build import build
from jaxgpt.trainer.program import Program


def config(model: str = "modern", optimizer: str = "muon", mesh: MeshConfig | None = None, **train) -> Config:  # type: ignore[no-untyped-def]
    return Config(
        model=small(model, block_size=8, n_layer=3, dropout=0.1),
        optim=OptimConfig(name=optimizer, warmup_steps=2, ema_decay=0.9),  # type: ignore[arg-type]
        train=TrainConfig(**({"batch_size": 8, "steps": 10, "scan_layers": True} | train)),
        mesh=mesh or MeshConfig(data=1),
    )


def train(p: Program, steps: int) -> tuple[list[float], object]:
    state = p.init()
    losses = []
    for step in range(steps):
        batch = np.asarray(random_ids(p.config.model, (8, 9), step))
        state, metrics = p.step(state, p.put(batch))
        losses.append(float(metrics["loss"]))
    return losses, state


def assert_same(a: object, b: object, **tolerance: float) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


long = pytest.mark.long


def test_stacked_layers_have_no_cache() -> None:
    model, params = make(small("gpt2"))
    tokens = random_ids(model.config, (1, 4))
    scanned = ScannedGPT(model.config)
    _, cache = compiled(model, params, tokens, 8, method="prefill")
    for method, argument in (("prefill", 8), ("extend", cache)):
        with pytest.raises(TypeError, match="generate with GPT and the result of unstack_layers"):
            scanned.apply({"params": stack_layers(params)}, tokens, argument, method=method)


def test_unstack_inverts_stack() -> None:
    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.random.default_rng(leaf.size).random(leaf.shape, np.float32)

    twelve = small("llama", n_layer=12)  # h_10 comes after h_9
    params = jax.tree.map(draw, abstract_params(twelve))
    tree = {"state": (params, [params, {"count": 3}])}
    stacked = stack_layers(tree)
    kernel = stacked["state"][1][0]["h"]["mlp"]["up_proj"]["kernel"]
    assert (kernel[10] == params["h_10"]["mlp"]["up_proj"]["kernel"]).all()
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked, 12), tree)
    assert jax.tree.structure(stack_layers(stacked)) == jax.tree.structure(stacked)

    boxed = jax.eval_shape(lambda: boxed_params(GPT(twelve), 0))
    assert jax.eval_shape(lambda tree: unstack_layers(stack_layers(tree), 12), boxed) == boxed


@pytest.mark.parametrize("name", ["muon", pytest.param("adamw", marks=long), pytest.param("adafactor", marks=long)])
def test_an_update_of_a_stack_equals_updates_of_its_layers(name: str) -> None:
    """Muon and Adafactor treat the matrix of each layer separately, and the same weights decay."""
    model, params = make(small("modern", n_layer=2, n_embd=128 if name == "adafactor" else 16))
    optimizer = make_optimizer(replace(config(optimizer=name), model=model.config))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda w: jax.numpy.asarray(rng.normal(size=w.shape), w.dtype), params)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def update(grads: object, state: object, params: object) -> object:
        return optimizer.update(grads, state, params)  # type: ignore[arg-type]

    expected = stack_layers(update(grads, state, params))
    found = update(stack_layers(grads), stack_layers(state), stack_layers(params))
    assert_same(found, expected, rtol=1e-4, atol=1e-6)

    # The initial state of a stack.
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stack_layers(state))
    assert jax.eval_shape(optimizer.init, stack_layers(params)) == stacked

    # The mask of a stack has one value for all layers.
    decayed = stack_layers(jax.tree.map(np.float32, decay_mask(params, model.config)))
    mask = decay_mask(stack_layers(params), model.config)
    assert_same(jax.tree.map(lambda decays, layers: np.full(layers.shape, decays), mask, decayed), decayed)


@long
def test_scanned_training_equals_unrolled_on_a_mesh_and_after_a_resume() -> None:
    """Train on 8 devices; both layouts write the same checkpoint and resume from it."""
    c = config(mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    scanned = build(c)
    plain = build(replace(c, train=replace(c.train, scan_layers=False)))
    losses, state = train(scanned, 3)
    expected, state_plain = train(plain, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)

    kernel = state.params["h"]["mlp"]["up_proj"]["kernel"]  # type: ignore[attr-defined]
    assert kernel.addressable_shards[0].data.shape == (3, kernel.shape[1] // 2, kernel.shape[2] // 2)

    # Both layouts restore the checkpoint.
    saved = scanned.to_checkpoint(state)  # type: ignore[arg-type]
    with Saver(Path("checkpoints"), c.train) as saver:
        saver.save(saved, Info(3))
    restored_plain = plain.restore(Path("checkpoints"), 3)
    assert jax.tree.structure(restored_plain) == jax.tree.structure(state_plain)
    restored = scanned.restore(Path("checkpoints"), 3)
    assert_same(jax.device_get(restored), jax.device_get(state))
    assert shardings_of(restored) == shardings_of(state)

    # Both continue alike.
    batch = np.asarray(random_ids(c.model, (8, 9), 3))
    _, metrics = scanned.step(restored, scanned.put(batch))
    _, metrics_plain = plain.step(restored_plain, plain.put(batch))
    np.testing.assert_allclose(metrics_plain["loss"], metrics["loss"], rtol=1e-5)

    # Both evaluate alike. A step donates its state, so the average comes from `saved`.
    ema = plain.put_params(unstack_layers(jax.device_get(saved.ema), 3))
    expected_loss = plain.sums(ema, plain.put(batch)).loss_B
    loss = scanned.sums(scanned.put_params(ema), scanned.put(batch)).loss_B
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)


def shardings_of(state: object) -> object:
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def test_different_windows_are_one_line() -> None:
    """Config rejects the pattern; a model made in Python has no such check."""
    model, params = make(small("gpt2", n_layer=2, sliding_window=4, window_pattern="LG"))
    tokens = random_ids(model.config, (1, 8))
    with pytest.raises(ValueError, match=r"the same sliding window in all layers; use GPT for the pattern: \[0, 4\]"):
        ScannedGPT(model.config).apply({"params": stack_layers(params)}, tokens)
