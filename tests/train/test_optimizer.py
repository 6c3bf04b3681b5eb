"""Schedules at their corners, which weights decay, which go to Muon."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make, small

from jaxgpt.config import Config, OptimConfig, TrainConfig
from jaxgpt.train.optimizer import decay_mask, groups, make_optimizer, schedule


def config(steps: int = 100, **optim) -> Config:  # type: ignore[no-untyped-def]
    settings = {"learning_rate": 1e-3, "min_lr": 1e-4, "warmup_steps": 10} | optim
    return Config(optim=OptimConfig(**settings), train=TrainConfig(steps=steps))


@pytest.mark.parametrize(
    ("optim", "step", "rate"),
    [
        ({}, 0, 1e-3 / 11),  # nanoGPT's warm-up: lr (it + 1) / (warmup + 1)
        ({}, 9, 1e-3 * 10 / 11),
        ({}, 10, 1e-3),
        ({}, 55, (1e-3 + 1e-4) / 2),
        ({}, 100, 1e-4),
        ({}, 1000, 1e-4),
        ({"decay_steps": 50}, 50, 1e-4),
        ({"schedule": "linear"}, 55, (1e-3 + 1e-4) / 2),
        ({"schedule": "linear", "min_lr": 0.0}, 100, 0.0),
        ({"schedule": "wsd"}, 79, 1e-3),
        ({"schedule": "wsd"}, 90, (1e-3 + 1e-4) / 2),
        ({"schedule": "wsd", "cooldown_steps": 50}, 50, 1e-3),
        ({"schedule": "wsd", "cooldown_steps": 50}, 100, 1e-4),
        ({"schedule": "constant"}, 9, 1e-3 * 10 / 11),
        ({"schedule": "constant"}, 10_000, 1e-3),
        ({"warmup_steps": 0}, 0, 1e-3),
        ({"warmup_steps": 200}, 150, 1e-3 * 151 / 201),
    ],
)
def test_schedule(optim: dict, step: int, rate: float) -> None:  # type: ignore[type-arg]
    np.testing.assert_allclose(schedule(config(**optim))(step), rate, rtol=1e-5, atol=1e-12)


def test_schedule_of_another_peak_has_the_same_shape() -> None:
    c = config()
    for step in (0, 5, 10, 60, 100):
        np.testing.assert_allclose(schedule(c, 0.02)(step), 20 * schedule(c)(step), rtol=1e-5)


def names(tree: object) -> dict[str, object]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def test_decay_mask_lists_exactly_kernels_and_embeddings() -> None:
    _, params = make(small("gpt2", n_layer=1))
    decayed = {name for name, decays in names(decay_mask(params)).items() if decays}
    block = [f"h_0/attn/{p}_proj/kernel" for p in "qkvo"] + ["h_0/mlp/up_proj/kernel", "h_0/mlp/down_proj/kernel"]
    assert decayed == {"wte/embedding", "wpe/embedding", *block}


def test_nanogpt_decays_the_published_number_of_weights() -> None:
    """26 tensors with 10,740,096 numbers, 13 with 4,992; our q, k and v are three tensors of nanoGPT's one."""
    from jaxgpt.cli.info import with_vocab
    from jaxgpt.presets import preset
    from jaxgpt.train.build import abstract_params

    params = abstract_params(with_vocab(preset("nanogpt-gpu")).model)
    sizes = [
        (leaf.size, decays)
        for leaf, decays in zip(jax.tree.leaves(params), jax.tree.leaves(decay_mask(params)), strict=True)
    ]
    assert sum(size for size, decays in sizes if decays) == 10_740_096
    assert sum(size for size, decays in sizes if not decays) == 4_992


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else() -> None:
    _, params = make(small("llama", n_layer=1))
    muon = {name for name, group in names(groups(params)).items() if group == "muon"}
    assert muon == {f"h_0/attn/{p}_proj/kernel" for p in "qkvo"} | {
        f"h_0/mlp/{p}_proj/kernel" for p in ("up", "gate", "down")
    }


def test_muon_updates_are_orthogonal_matrices_over_the_right_axes() -> None:
    """q as [D, N * H], o as [N * H, D]: the singular values of an update are near one another."""
    _, params = make(small("gpt2", n_embd=16, n_layer=1))
    c = config(name="muon", weight_decay=0.0, grad_clip=0.0, muon_learning_rate=1.0, min_lr=1e-3, warmup_steps=0)
    optimizer = make_optimizer(c)
    grads = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    block = updates["h_0"]
    for kernel, shape in [
        (block["attn"]["q_proj"]["kernel"], (16, 16)),
        (block["attn"]["o_proj"]["kernel"], (16, 16)),
        (block["mlp"]["up_proj"]["kernel"], (16, 64)),
    ]:
        values = np.linalg.svd(np.asarray(kernel).reshape(shape), compute_uv=False)
        assert values.min() > 0.3 * values.max()
    assert (np.abs(updates["wte"]["embedding"]) < 2e-3).all(), "Adam's step is its learning rate"


def test_clipping_is_by_the_global_norm() -> None:
    params = {"a": {"kernel": jnp.ones(3)}, "b": {"kernel": jnp.ones(4)}}
    c = config(grad_clip=1.0, weight_decay=0.0)
    grads = jax.tree.map(lambda leaf: 100 * leaf, params)
    state = make_optimizer(c).init(params)
    _, state = make_optimizer(c).update(grads, state, params)
    moments = state[1][0].mu
    norm = np.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(moments))) / (1 - c.optim.beta1)
    np.testing.assert_allclose(norm, 1.0, rtol=1e-5)
