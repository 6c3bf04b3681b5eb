"""Learning-rate schedules, weight decay masks, Muon and the other optimizers."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make, small

from jaxgpt.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.model import GPT
from jaxgpt.model.params import weight_at
from jaxgpt.model.scan import stack_layers
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import use_mesh
from jaxgpt.train.muon import orthogonal
from jaxgpt.train.optimizer import decay_mask, make_optimizer, muon_labels
from jaxgpt.train.schedule import schedule


def config(model: ModelConfig | None = None, **optim: Any) -> Config:
    settings = {"learning_rate": 1e-3, "min_lr": 1e-4, "warmup_steps": 10} | optim
    return Config(model=model or ModelConfig(), optim=OptimConfig(**settings), train=TrainConfig(steps=100))


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


def random_like(tree: Any, seed: int = 0) -> Any:
    """Return random arrays of the same shapes, drawn by NumPy: nothing is compiled."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), tree)


def names(tree: object) -> dict[str, object]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def test_only_kernels_and_embeddings_decay() -> None:
    model, params = make(small("gpt2", n_layer=1))
    mask = names(decay_mask(params, model.config))
    attention = {f"h_0/attn/{p}_proj/kernel" for p in "qkvo"}
    mlp = {"h_0/mlp/up_proj/kernel", "h_0/mlp/down_proj/kernel"}
    assert {name for name, decays in mask.items() if decays} == {"wte/embedding", "wpe/embedding"} | attention | mlp


def test_nanogpt_decays_the_published_number_of_weights() -> None:
    """nanoGPT decays 26 tensors (10,740,096 parameters) of 39; in jaxgpt, q, k and v are separate tensors."""
    from jaxgpt.cli.settings import with_vocab
    from jaxgpt.model.params import abstract_params
    from jaxgpt.presets import preset

    model = with_vocab(preset("nanogpt-gpu")).model
    params = abstract_params(model)
    leaves = jax.tree.leaves(params)
    decays = jax.tree.leaves(decay_mask(params, model))
    decayed = sum(leaf.size for leaf, decay in zip(leaves, decays, strict=True) if decay)
    assert decayed == 10_740_096
    assert sum(leaf.size for leaf in leaves) - decayed == 4_992


def test_muon_updates_only_the_matrices_of_blocks() -> None:
    model, params = make(small("llama", n_layer=1))
    attention = {f"h_0/attn/{p}_proj/kernel" for p in "qkvo"}
    mlp = {f"h_0/mlp/{p}_proj/kernel" for p in ("up", "gate", "down")}
    assert muon_names(model, params) == attention | mlp


def muon_names(model: GPT, params: Any) -> set[str]:
    """Return the names of the parameters that Muon updates."""
    return {name for name, group in names(muon_labels(params, model.config)).items() if group == "muon"}


@pytest.mark.parametrize("scanned", [False, True])
def test_muon_equals_optax_muon(scanned: bool) -> None:
    """Matrices of one shape are batched, regardless of their longer side; optax updates them one by one."""
    model, params = make(small("llama", n_layer=2))
    params = stack_layers(params) if scanned else params
    c = config(model.config, name="muon", weight_decay=0.1, grad_clip=0.0, muon_steps=4, muon_momentum=0.9)

    def sides(path: tuple[Any, ...], leaf: Any) -> optax.contrib.MuonDimensionNumbers:
        weight = weight_at(path, model.config)
        assert weight is not None
        assert weight.shape == leaf.shape[scanned:]
        return optax.contrib.MuonDimensionNumbers(scanned, scanned + 1)

    theirs = optax.contrib.muon(
        lambda step: c.optim.muon_ratio * schedule(c)(step), ns_steps=4, beta=0.9, weight_decay=0.1,
        muon_weight_dimension_numbers=partial(jax.tree_util.tree_map_with_path, sides),
    )  # fmt: skip
    unchanged = optax.identity()
    reference = optax.partition({"muon": theirs, "adam": unchanged}, partial(muon_labels, model=model.config))

    @partial(jax.jit, static_argnums=0)
    def second_update(optimizer: optax.GradientTransformation, first: Any, second: Any) -> Any:
        _, state = optimizer.update(first, optimizer.init(params), params)
        updates, _ = optimizer.update(second, state, params)
        return updates

    grads = [random_like(params, n) for n in range(2)]
    updates = names(second_update(make_optimizer(c), *grads))
    expected = names(second_update(reference, *grads))
    matrices = muon_names(model, params)
    assert len(matrices) == (7 if scanned else 14)
    for name in matrices:
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-5, atol=1e-7)


def test_muon_divides_the_matrices_among_devices() -> None:
    """With 12 matrices of attention and 9 of the MLP on 8 devices, no device has more than 2 and the result is the same."""
    model = small("llama", n_layer=3, n_kv_head=4)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    _, params = make(model)
    blocks = {name: leaf for name, leaf in params.items() if name.startswith("h_")}
    kernels = {name: {part: block[part] for part in ("attn", "mlp")} for name, block in blocks.items()}
    matrices = jax.tree.map(lambda leaf: leaf / jnp.linalg.norm(leaf), kernels)

    def compute(matrices: Any) -> Any:
        return orthogonal(matrices, 2, model)

    with use_mesh(mesh, model):
        compiled = jax.jit(compute).lower(matrices).compile()
        spread = compiled(matrices)
    batches = {int(n) for n in re.findall(r"= f32\[(\d+),\d+,\d+\]\S* dot\(", compiled.as_text())}
    assert batches == {2}

    on_one_device = jax.jit(lambda matrices: compute(matrices))(matrices)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), spread, on_one_device)


FACTORIES = {
    "adamw": lambda rate: optax.adamw(rate, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.0),
    "lion": lambda rate: optax.lion(rate, b1=0.8, b2=0.95, weight_decay=0.0),
    "sgd": lambda rate: optax.sgd(rate, momentum=0.8),
    "adafactor": lambda rate: optax.adafactor(rate),
}


@pytest.mark.parametrize(
    "name", ["adamw", *(pytest.param(n, marks=pytest.mark.long) for n in FACTORIES if n != "adamw")]
)
def test_optimizers_equal_optax_with_decoupled_weight_decay(name: str) -> None:
    """`w <- w + update - rate decay w`, with decay for kernels and embeddings; the width is enough for Adafactor to factor."""
    model, params = make(small("gpt2", n_layer=1, n_embd=128))
    c = config(
        model.config, name=name, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.5, learning_rate=0.01, warmup_steps=2
    )
    rate = schedule(c)
    ours = make_optimizer(c)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), FACTORIES[name](rate))

    def decay(path: tuple[Any, ...], w: jax.Array, step: int) -> jax.Array:
        return 0.5 * rate(step) * w if path[-1].key in ("kernel", "embedding") else jnp.zeros_like(w)

    @jax.jit
    def with_our_optimizer(w: Any, grads: list[Any]) -> Any:
        state = ours.init(w)
        for grad in grads:
            updates, state = ours.update(grad, state, w)
            w = optax.apply_updates(w, updates)
        return w

    @jax.jit
    def by_hand(w: Any, grads: list[Any]) -> Any:
        state = theirs.init(w)
        for step, grad in enumerate(grads):
            updates, state = theirs.update(grad, state, w)
            lost = jax.tree_util.tree_map_with_path(partial(decay, step=step), w)
            w = jax.tree.map(jnp.subtract, optax.apply_updates(w, updates), lost)
        return w

    grads = [random_like(params, n) for n in range(3)]
    found = names(with_our_optimizer(params, grads))
    expected = names(by_hand(params, grads))
    for leaf, value in expected.items():
        np.testing.assert_allclose(found[leaf], value, rtol=1e-5, atol=1e-7, err_msg=leaf)
        assert not np.array_equal(value, names(params)[leaf])
    factored = [x for x in jax.tree.leaves(ours.init(params)) if x.shape in ((model.config.n_embd,), (512,))]
    assert bool(factored) or name != "adafactor"


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_first_moments_have_the_dtype_of_the_config(name: str) -> None:
    """Each weight has such a moment before and after an update; second moments stay float32."""
    model, params = make(small("gpt2", n_layer=1))
    optimizer = make_optimizer(config(model.config, name=name, momentum_dtype="bfloat16"))

    def states(grads: Any) -> tuple[Any, Any]:
        before = optimizer.init(params)
        _, after = optimizer.update(grads, before, params)
        return before, after

    for state in jax.eval_shape(states, params):
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim]
        assert dtypes.count(jnp.dtype("bfloat16")) == len(jax.tree.leaves(params))
        assert set(dtypes) <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}
