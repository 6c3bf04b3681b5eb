"""Laws of the model, for every branch of its config."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import every_model, make, random_ids, small

from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.kernels import CPU, best
from jaxgpt.kernels.tiled import tiled_attention
from jaxgpt.model import GPT, KVCache
from jaxgpt.model.init import init_params
from jaxgpt.model.norm import Norm
from jaxgpt.model.params import abstract_params, flatten_params, weight_at, weights
from jaxgpt.model.scan import stack_layers
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Visible, attend, row_positions
from jaxgpt.ops.dropout import dropout
from jaxgpt.ops.rotary import Llama3Scaling, rope_frequencies, rope_rotation


@partial(jax.jit, static_argnums=0)
def forward(model: GPT, params: object, tokens: jax.Array) -> jax.Array:
    """Compute the logits in one program, because eager mode would compile each operation."""
    return model.apply({"params": params}, tokens)


@partial(jax.jit, static_argnums=0)
def extend(model: GPT, params: object, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    result: Any = model.apply({"params": params}, tokens, cache, method="extend")
    return result


@partial(jax.jit, static_argnums=(0, 4))
def prefill(model: GPT, params: object, tokens: jax.Array, start_B: jax.Array, slots: int) -> tuple[jax.Array, KVCache]:
    """Compute prompts that begin at slot `start_B`, after padding."""
    padded = jnp.where(jnp.arange(tokens.shape[1])[None] < start_B[:, None], -1, tokens)
    result: Any = model.apply({"params": params}, padded, slots, method="prefill")
    return result


BOTH = [Ops(), CPU]  # the definitions, and the operations most affected by a cache
with_both = pytest.mark.parametrize("ops", [Ops(), pytest.param(CPU, marks=pytest.mark.ci)], ids=["definition", "cpu"])


@every_model
def test_causal_by_gradient(name: str) -> None:
    """The gradient of the logits at t with respect to later inputs is exactly zero."""
    config = small(name)
    model, params = make(config)
    x_BTD = jax.random.normal(jax.random.key(3), (1, 10, config.n_embd))

    @jax.jit
    @jax.grad
    def slope(x_BTD: jax.Array, t: jax.Array) -> jax.Array:
        hidden, _, _ = model.apply({"params": params}, x_BTD, row_positions(10), method="stack")
        return model.apply({"params": params}, hidden, method="head")[0, t].sum()

    for t in (0, 4, 9):
        slope_T = np.abs(slope(x_BTD, jnp.int32(t))).sum((0, 2))
        assert (slope_T[t + 1 :] == 0).all()
        assert slope_T[t] > 0


def test_forward_and_reverse_mode_are_adjoint() -> None:
    """`<u, Df v> = <Df^T u, v>` for the logits as a function of the weights, on the definitions."""
    config = small("llama")
    model, params = make(config)
    _, direction = make(config, seed=1)
    ids = random_ids(config, (2, 12))
    u_BTV = jnp.asarray(np.random.default_rng(2).normal(size=(2, 12, config.vocab_size)), jnp.float32)

    @jax.jit
    def both(params: Any, v: Any, u_BTV: jax.Array) -> tuple[jax.Array, Any]:
        def logits(params: Any) -> jax.Array:
            out_BTV: jax.Array = model.apply({"params": params}, ids)
            return out_BTV

        _, pushed_BTV = jax.jvp(logits, (params,), (v,))
        _, pull_back = jax.vjp(logits, params)
        return pushed_BTV, pull_back(u_BTV)[0]

    pushed_BTV, pulled = both(params, direction, u_BTV)
    left = np.vdot(u_BTV, pushed_BTV)
    right = sum(np.vdot(a, b) for a, b in zip(jax.tree.leaves(pulled), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(left, right, rtol=1e-3)


def test_operations_of_cpus_have_rules_for_reverse_mode_only() -> None:
    """Therefore, docs/own/loop.md and the course use the model `GPT(config)` for forward mode."""
    config = small("gpt2")
    model = GPT(config, CPU)
    _, params = make(config)
    ids = random_ids(config, (1, 12))

    @jax.jit
    def forward_mode(params: Any) -> Any:
        return jax.jvp(lambda params: model.apply({"params": params}, ids), (params,), (params,))

    with pytest.raises(TypeError, match=r"forward-mode autodiff .* custom_vjp"):
        forward_mode(params)


def test_sliding_window_limits_attention() -> None:
    """With one layer and a window of w, a token does not affect the logits w tokens later."""
    config = small("modern", n_layer=1)
    model, params = make(config)
    tokens = random_ids(config, (1, 12))
    changed = tokens.at[:, 2].set((tokens[:, 2] + 1) % config.vocab_size)
    before, after = (forward(model, params, t) for t in (tokens, changed))
    w = config.sliding_window
    assert (before[:, 2 + w - 1] != after[:, 2 + w - 1]).any()
    assert (before[:, 2 + w :] == after[:, 2 + w :]).all()


def test_attention_gets_the_window_of_each_layer() -> None:
    config = small("gemma", n_layer=3)
    _, params = make(config)
    tokens = random_ids(config, (2, 12))
    windows = []

    def attend(*args: Any) -> jax.Array:
        windows.append(args[3].window)
        return tiled_attention(*args[:5])

    by_kernel = forward(GPT(config, Ops(attend=attend)), params, tokens)  # type: ignore[arg-type]
    np.testing.assert_allclose(by_kernel, forward(GPT(config), params, tokens), atol=1e-5, rtol=0)
    assert windows == [4, 0, 4]


def check_pieces(name: str, ops: Ops, starts: tuple[int, ...], pieces: Sequence[int], stale: bool = False) -> None:
    """Prefill the first piece of a text and extend it with the others: the logits match each row alone.

    Args:
        name: the model.
        ops: the operations.
        starts: first slot of each row, after padding.
        pieces: number of tokens of each piece.
        stale: reset the cache of a different text after the first piece.
    """
    config = small(name)
    params = make(config)[1]
    model = GPT(config, ops)
    first = pieces[0]
    total = sum(pieces)
    tokens = random_ids(config, (len(starts), total))
    start_B = jnp.array(starts)
    seen = random_ids(config, tokens.shape, seed=1).at[:, :first].set(tokens[:, :first]) if stale else tokens[:, :first]
    logits, cache = prefill(model, params, seen, start_B, total + 1)
    cache = cache._replace(length=jnp.int32(first))
    parts = [logits[:, :first]]
    for n in pieces[1:]:
        logits, cache = extend(model, params, tokens[:, cache.length : cache.length + n], cache)
        parts.append(logits)
    assert (cache.length, cache.length.dtype) == (total, jnp.int32)
    if not stale:
        expected = [[max(slot - at, -1) for slot in range(total)] + [-1] for at in starts]
        assert cache.position_BS.tolist() == expected
    for row, at in enumerate(starts):
        alone = forward(GPT(config), params, tokens[row : row + 1, at:])[0]
        np.testing.assert_allclose(jnp.concatenate(parts, 1)[row, at:], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("splits", [(1, 3, 6), pytest.param(range(1, 8), marks=pytest.mark.long)], ids=["some", "all"])
@with_both
@every_model
def test_cached_logits_equal_full_logits_for_every_split(name: str, ops: Ops, splits: Sequence[int]) -> None:
    """By default, test a split below, within and above the sliding window; the remainder is also added in one piece."""
    T = 7  # longer than the window, shorter than the context
    for n in splits:
        check_pieces(name, ops, (0, 0), (n, *[1] * (T - n)))
    check_pieces(name, ops, (0, 0), (splits[0], T - splits[0]))


@with_both
@pytest.mark.parametrize("name", ["gemma", *(pytest.param(n, marks=pytest.mark.long) for n in ("gpt2", "torch"))])
def test_left_padding_does_not_change_logits(name: str, ops: Ops) -> None:
    check_pieces(name, ops, (0, 3, 6), (7, 2))


def test_a_kernel_reads_left_padded_prompts() -> None:
    """Padding does not affect the following tokens."""
    calls: list[Any] = []

    def kernel(q: Any, k: Any, v: Any, visible: Visible, *args: Any) -> jax.Array:
        if visible.key:
            return attend(q, k, v, visible, *args)
        calls.append(args)
        return tiled_attention(q, k, v, visible, args[0])

    check_pieces("gemma", Ops(attend=kernel), (0, 3, 6), (7, 2))
    assert len(calls) == small("gemma").n_layer


@pytest.mark.parametrize("ops", [CPU, pytest.param(Ops(), marks=pytest.mark.ci)], ids=["cpu", "definition"])
def test_slots_of_a_cache_that_is_set_back_are_never_seen(ops: Ops) -> None:
    check_pieces("gemma", ops, (0, 2), (4, 1, 2, 1, 3), stale=True)


@pytest.mark.parametrize("length", [0, 1])
def test_a_cache_that_is_set_back_to_the_padding_of_a_row_has_no_token_of_this_row(length: int) -> None:
    config = small("gemma")
    model, params = make(config)
    T = 5
    stale = random_ids(config, (2, T), seed=1)
    _, cache = prefill(model, params, stale, jnp.array((1, 3)), T)
    cache = cache._replace(length=jnp.int32(length))

    tokens = random_ids(config, (2, T - length))
    first, cache = extend(model, params, tokens[:, :1], cache)
    others, _ = extend(model, params, tokens[:, 1:], cache)
    logits = jnp.concatenate([first, others], 1)
    np.testing.assert_allclose(logits, forward(model, params, tokens), atol=1e-5, rtol=0)


def test_models_are_values() -> None:
    """Equal configs and operations make equal models, which share traces; all other models differ."""
    config = small("gpt2")
    params = make(config)[1]
    tokens = random_ids(config, (1, 5))
    traced = jax.jit(
        chex.assert_max_traces(lambda model, params: model.apply({"params": params}, tokens), n=3), static_argnums=0
    )
    settings: list[Any] = [{}, {"ops": CPU}, {"ops": CPU._replace(dtype=jnp.bfloat16)}]
    for given in settings:
        first, second = (GPT(replace(config), **given) for _ in range(2))
        assert (first, hash(first)) == (second, hash(second))
        np.testing.assert_array_equal(traced(first, params), traced(second, params))
    assert len({GPT(config, **given) for given in settings}) == len(settings)
    assert GPT(config) != GPT(replace(config, norm_eps=1e-3))
    run = Config(model=config)
    assert GPT(config, best(run)) == GPT(config, best(run))
    assert hash(Ops()) == hash(Ops(dtype=jnp.dtype(Config().train.compute_dtype)))


@pytest.mark.parametrize("ops", BOTH, ids=["definition", "cpu"])
def test_edits_read_and_replace_named_activations(ops: Ops) -> None:
    """An edit receives path and name of each activation, including scores, which kernels do not store."""
    config = small("gemma", n_layer=1)
    params = make(config)[1]
    tokens = random_ids(config, (1, 9))

    @jax.jit
    def read() -> tuple[jax.Array, dict[str, jax.Array]]:
        seen = dict[str, jax.Array]()
        model = GPT(config, ops._replace(edit=lambda path, x: seen.setdefault(path, x)))
        return model.apply({"params": params}, tokens), seen

    def first_head_off(path: str, x: jax.Array) -> jax.Array:
        return x.at[:, :, 0].set(0) if path == "h_0/attn/head_out" else x

    logits, seen = read()
    np.testing.assert_allclose(logits, forward(GPT(config), params, tokens), atol=1e-5)
    assert seen["h_0/attn/pattern"].shape == (1, 4, 9, 9)
    names = {"h_0/attn/scores", "h_0/attn/q_norm/scale", "h_0/mlp/up", "h_0/resid.post", "ln_f/out", "logits"}
    assert names <= set(seen)
    edited = forward(GPT(config, ops._replace(edit=first_head_off)), params, tokens)
    kernel = params["h_0"]["attn"]["o_proj"]["kernel"].at[: config.head_width].set(0)
    attn = params["h_0"]["attn"] | {"o_proj": {"kernel": kernel}}
    without = params | {"h_0": params["h_0"] | {"attn": attn}}
    np.testing.assert_allclose(edited, forward(GPT(config), without, tokens), atol=1e-5)


def test_tied_weights_are_one_leaf_with_both_gradients() -> None:
    config = small("gpt2")
    model, params = make(config)
    assert "lm_head" not in params
    tokens = jnp.zeros((1, 3), jnp.int32)
    slope = jax.jit(jax.grad(lambda p: model.apply({"params": p}, tokens)[0, -1, 5]))(params)["wte"]["embedding"]
    assert jnp.abs(slope[5]).sum() > 0, "as the head"
    assert jnp.abs(slope[0]).sum() > 0, "as the embedding"


def test_dropout_keeps_the_mean() -> None:
    y = np.asarray(dropout(jnp.ones(100_000), 0.2, jax.random.key(0)))
    assert set(y.tolist()) == {0.0, 1.25}
    assert abs(y.mean() - 1) < 0.01


def test_every_place_of_dropout_draws_its_own_mask() -> None:
    """Half of the embeddings, attention weights and sublayer outputs are zero, with a different mask each time."""
    config = small("gpt2", dropout=0.5)
    params = make(config)[1]

    @jax.jit
    def run(params: Any) -> dict[str, list[jax.Array]]:
        seen = dict[str, list[jax.Array]]()

        def watch(path: str, x: jax.Array) -> jax.Array:
            seen.setdefault(path.split("/")[-1], []).append(x)
            return x

        GPT(config, Ops(edit=watch)).apply({"params": params}, random_ids(config, (32, 8)), jax.random.key(0))
        return seen

    seen = jax.device_get(run(params))
    pre, mid, post = (seen[f"resid.{name}"] for name in ("pre", "mid", "post"))
    added = [after == before for a, b, c in zip(pre, mid, post, strict=True) for before, after in ((a, b), (b, c))]
    first = [(out_BTNH[:, 0] == 0).all(-1) for out_BTNH in seen["head_out"]]  # the first token attends only to itself
    assert (len(added), len(first)) == (4, 2)
    for masks in ([pre[0] == 0, *added], first):
        for mask in (*masks, *(a ^ b for a, b in itertools.combinations(masks, 2))):
            assert 0.3 < mask.mean() < 0.7


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "stdnorm"])
def test_norms_in_bfloat16_round_once(kind: str) -> None:
    config = small("gpt2", n_embd=64, norm=kind)
    x = (3 * jax.random.normal(jax.random.key(0), (2, 3, 64)) + 1).astype(jnp.bfloat16)
    rough, wide = (Norm(config, Ops(dtype=dtype), config.norm) for dtype in (jnp.bfloat16, jnp.float32))
    variables = rough.init(jax.random.key(0), x)
    exact = wide.apply(variables, x.astype(jnp.float32))
    np.testing.assert_array_equal(rough.apply(variables, x), exact.astype(jnp.bfloat16))


def test_bfloat16_compute_keeps_float32_weights() -> None:
    config = small("modern")
    params = make(config)[1]
    tokens = random_ids(config, (2, 8))
    exact = forward(GPT(config), params, tokens)
    rough = forward(GPT(config, Ops(dtype=jnp.bfloat16)), params, tokens)
    assert rough.dtype == jnp.float32
    assert 0 < jnp.abs(exact - rough).max() < 0.5
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_more_tokens_than_learned_positions_raise() -> None:
    config = small("gpt2")
    model, params = make(config)
    with pytest.raises(ValueError, match="13 tokens do not fit the context of 12"):
        model.apply({"params": params}, random_ids(config, (1, 13)))


def test_soft_capped_logits_are_a_hyperbolic_tangent() -> None:
    config = small("modern", logit_softcap=2.0)
    _, params = make(config)
    tokens = random_ids(config, (2, 8))
    free, capped = (forward(GPT(replace(config, logit_softcap=cap)), params, tokens) for cap in (0.0, 2.0))
    np.testing.assert_allclose(capped, 2 * np.tanh(np.asarray(free) / 2), atol=1e-5)


def test_rope_tells_far_positions_apart() -> None:
    """Above 256, bfloat16 represents only some of the integers."""
    positions = np.array([[255, 257, 4099]])
    frequency = rope_frequencies(8, 1e4, Llama3Scaling())
    angles = positions[..., None] * frequency
    for found, exact in zip(rope_rotation(jnp.asarray(positions), frequency), (np.cos, np.sin), strict=True):
        np.testing.assert_allclose(found, exact(angles), atol=1e-3)


RESIDUAL = 1 / math.sqrt(2 * 2)  # 2 layers with 2 sublayers
UNIFORM = 1 / math.sqrt(3)  # standard deviation of a uniform distribution within +-1


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        (
            {"init_std": 0.05},
            {
                **dict.fromkeys(("wte/embedding", "wpe/embedding", "h_1/attn/q_proj/kernel"), 0.05),
                **dict.fromkeys(("h_1/attn/o_proj/kernel", "h_1/mlp/down_proj/kernel"), 0.05 * RESIDUAL),
            },
        ),
        (
            {"init": "torch"},
            {
                **dict.fromkeys(("wte/embedding", "wpe/embedding"), 1.0),
                **dict.fromkeys(("h_1/attn/q_proj/kernel", "h_1/attn/o_proj/kernel"), UNIFORM / math.sqrt(64)),
                "h_1/mlp/down_proj/kernel": UNIFORM / math.sqrt(256),
            },
        ),
    ],
    ids=["gpt2", "torch"],
)
def test_spread_of_initial_weights(init: dict[str, Any], expected: dict[str, float]) -> None:
    config = ModelConfig(vocab_size=200, block_size=64, n_layer=2, n_embd=64, n_head=4, **init)

    @jax.jit
    def spread() -> dict[str, jax.Array]:
        weights = flatten_params(init_params(GPT(config)))
        return {name: weights[name].std() for name in expected}

    for name, std in spread().items():
        assert float(std) == pytest.approx(expected[name], rel=0.05), name


@every_model
def test_abstract_parameters_are_those_of_the_initialization(name: str) -> None:
    config = small(name, n_layer=11)  # h_10 comes before h_2
    abstract = abstract_params(config)
    initial = jax.eval_shape(lambda: init_params(GPT(config)))
    assert list(abstract) == list(initial)
    assert abstract == initial
    abstract["h_1"]["attn"].clear()
    assert abstract_params(config) == initial


@every_model
def test_the_table_of_weights_is_that_of_the_modules(name: str) -> None:
    """Every weight is a matrix `[in, out]`, a table or a vector; stacked layers have the same entries."""
    config = small(name, n_layer=3)
    table = weights(config)
    assert {path: weight.shape for path, weight in table.items()} == {
        path: leaf.shape for path, leaf in flatten_params(abstract_params(config)).items()
    }
    assert {len(weight.shape) for weight in table.values()} <= {1, 2}
    kinds = {path.split("/")[-1]: set[str]() for path in table}
    for path, weight in table.items():
        kinds[path.split("/")[-1]].add(weight.kind)
        assert weight.in_block == (path.startswith("h_") and path.endswith("kernel"))
        assert len(weight.axes) == len(weight.shape)
    for leaf, found in kinds.items():
        assert found <= {"kernel": {"matrix"}, "embedding": {"table", "positions"}}.get(leaf, {"vector"})
    for tree in (abstract_params(config), jax.eval_shape(stack_layers, abstract_params(config))):
        for path, _ in jax.tree.leaves_with_path(tree):
            assert weight_at(path, config) is not None
    blocks = [path.split("/")[0] for path in table if path.startswith("h_")]
    assert blocks == sorted(blocks), "in the order of their first use"


def test_a_weight_of_another_shape_raises() -> None:
    config = small("gpt2")
    params = make(config)[1] | {"wte": {"embedding": jnp.zeros((16, 16))}}
    with pytest.raises(ValueError, match=r"wte/embedding has shape \(16, 16\); expected \(17, 16\)"):
        GPT(config).apply({"params": params}, random_ids(config, (1, 3)))


def test_a_model_called_without_its_weights_says_what_to_write() -> None:
    """Users of PyTorch may write `model(ids)`."""
    with pytest.raises(TypeError, match=r'use model\.apply\(\{"params": params\}, tokens\)'):
        GPT(small("gpt2"))(jnp.zeros((1, 4), jnp.int32))


def test_a_model_without_a_vocabulary_says_so() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size is 0: set it"):
        abstract_params(ModelConfig())
