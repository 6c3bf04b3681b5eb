"""examples/plain.py, the decoder in one file, computes what the package computes; the model also runs from `ops` alone."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make, random_ids, repository

import jaxgpt
from jaxgpt.config import Config, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.data.tokenizers.base import WordTokenizer
from jaxgpt.model.params import abstract_params
from jaxgpt.train.optimizer import make_optimizer

EXAMPLES = repository() / "examples"
MODEL = ModelConfig(
    vocab_size=17, block_size=12, n_layer=2, n_head=4, n_embd=16, norm="layernorm", activation="gelu_new", init_std=0.3
)


@pytest.fixture(scope="module")
def plain() -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / "plain.py")))


@pytest.fixture(scope="module")
def small(plain: Any) -> Any:
    return plain.Config(vocab_size=17, block_size=12, n_layer=2, n_head=4, n_embd=16, steps=6, warmup_steps=2)


@pytest.fixture(autouse=True)
def broadcasting() -> Iterator[None]:
    """Permit what the package's own code does not use: the file broadcasts as NumPy does."""
    with jax.numpy_rank_promotion("allow"):
        yield


def test_initial_weights_have_the_shapes_of_the_package(plain: Any, small: Any) -> None:
    ours = jax.eval_shape(partial(plain.init_params, small), jax.random.key(0))
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, abstract_params(MODEL))


def test_logits_are_those_of_the_package(plain: Any, small: Any) -> None:
    model, params = make(MODEL)
    ids = random_ids(MODEL, (2, 9))
    expected = jax.jit(model.apply)({"params": params}, ids)
    np.testing.assert_allclose(plain.logits(small, params, ids), expected, rtol=1e-4, atol=1e-5)


def test_steps_are_those_of_the_package(plain: Any, small: Any) -> None:
    """Compare loss, gradient, clipping, schedule and AdamW."""
    model, params = make(MODEL)
    optim = OptimConfig(
        name="adamw", learning_rate=3e-3, min_lr=3e-4, warmup_steps=2, beta1=0.9, beta2=0.99, weight_decay=0.1
    )
    optimizer = make_optimizer(Config(model=MODEL, optim=optim, train=TrainConfig(steps=6)))
    objective = jaxgpt.next_token_loss(model.apply)
    step = jax.jit(partial(jaxgpt.train_step, objective=objective, optimizer=optimizer))
    theirs = jaxgpt.init_state(params, optimizer)
    zeros = jax.tree.map(jnp.zeros_like, params)
    ours = plain.State(params, zeros, zeros, jnp.int32(0))
    for i in range(5):
        windows = random_ids(MODEL, (4, 13), seed=i)
        ours, value = plain.train_step(small, ours, windows)
        theirs, metrics = step(theirs, windows)
        np.testing.assert_allclose(value, metrics["loss"], rtol=1e-4)
    # The bias of the keys has a gradient of 0 up to rounding, which Adam enlarges: it is compared by its effect.
    ours_BTV, theirs_BTV = (plain.logits(small, params, windows[:, :-1]) for params in (ours.params, theirs.params))
    np.testing.assert_allclose(ours_BTV, theirs_BTV, rtol=2e-3, atol=2e-3)


def test_greedy_text_is_that_of_the_package(plain: Any, small: Any) -> None:
    _, params = make(MODEL)
    prompt = [3, 1, 4]
    lm = jaxgpt.LM(Config(model=MODEL), params, WordTokenizer(map(str, range(17))))
    [out] = jaxgpt.generate(lm, [prompt], max_new_tokens=8, temperature=0)
    assert plain.sample(small, params, prompt, 8, jax.random.key(0), 0) == [*prompt, *map(int, out.ids)]


OPS_ALONE = """
import sys
sys.modules["flax"] = sys.modules["optax"] = sys.modules["orbax"] = None  # an import of these fails
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, numpy as np, plain
from jaxgpt import ops
from jaxgpt.ops.attention import Visible, row_positions
table = ops.Ops()
c = plain.Config(vocab_size=17, block_size=12, n_embd=16)
params = plain.init_params(c, jax.random.key(0))
ids = jnp.arange(10)[None] % 7
expected = plain.logits(c, params, ids)
plain.linear = lambda x, p: table.linear(x, p["kernel"], p["bias"], table.dtype)
plain.norm = lambda x, p: table.norm("layernorm", x, 1e-5, p["scale"], p["bias"], None)
def attend(q, k, v):
    visible = Visible(row_positions(q.shape[1]))
    return table.attend(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 3, 1), visible, q.shape[-1] ** -0.5, None)
plain.attend = attend
np.testing.assert_allclose(plain.logits(c, params, ids), expected, rtol=1e-4, atol=1e-6)
"""


@pytest.mark.ci
def test_the_model_runs_from_ops_without_flax() -> None:
    """The mathematics does not depend on the module library: only the declaration of the weights does."""
    subprocess.run([sys.executable, "-c", OPS_ALONE, str(EXAMPLES)], check=True)
