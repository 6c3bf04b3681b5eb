"""Small configs and models that many tests share."""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import json
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.cli import main
from jaxgpt.cli.parse import parse
from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.kernels.flash import cudnn_attention, splash_attention
from jaxgpt.lm import LM
from jaxgpt.model import GPT
from jaxgpt.model.params import abstract_params
from jaxgpt.trainer.metrics import read_metrics

TEXT = "".join(f"{n} times {n} is {n * n}, and {n} plus {n} is {2 * n}.\n" for n in range(400))

# Models that cover every branch of ModelConfig; all must obey the same laws.
ROPE = ModelConfig(positions="rope", norm="rmsnorm", bias=False)
GATED = replace(ROPE, mlp="gated")
SINUSOIDAL = ModelConfig(positions="sinusoidal", norm_position="post")
MODELS = {
    "gpt2": ModelConfig(),
    "nanogpt": ModelConfig(activation="gelu", bias=False),
    "modern": replace(ROPE, qk_norm=True, activation="relu2", sliding_window=5, logit_softcap=8.0),
    "llama": replace(
        replace(GATED, rope_factor=4.0, rope_original_context=8),
        activation="silu",
        n_kv_head=2,
        head_dim=6,
        tie_embeddings=False,
    ),
    "torch": replace(SINUSOIDAL, activation="relu", tie_embeddings=False, head_bias=True, init="torch"),
    "numpy": replace(SINUSOIDAL, norm="stdnorm", norm_affine=False, bias=False, attn_proj=False, n_head=1),
    "statquest": ModelConfig(
        positions="none",
        norm="none",
        final_norm=False,
        mlp="none",
        attn_proj=False,
        tie_embeddings=False,
        head_bias=True,
    ),
    "gemma": replace(
        replace(GATED, rope_local_theta=100.0, sliding_window=4, window_pattern="LG"),
        norm_position="both",
        qk_norm=True,
        embed_scale=True,
    ),
    "neox": ModelConfig(positions="rope", rope_fraction=0.5, parallel_residual=True, tie_embeddings=False),
    "olmo2": replace(ROPE, norm_position="output", qk_norm=True, qk_norm_per_head=False, qkv_bias=True),
    "experts": replace(
        replace(GATED, n_experts=4, experts_per_token=2, shared_experts=1),
        activation="silu",
        n_inner=8,
        router="sigmoid",
        router_bias=True,
        router_scale=1.5,
    ),
    "scaled": ModelConfig(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False, init="zero-proj", n_inner=20),
}

# Each kind of positions, norm and MLP once; the others combine them.
COMMON = ("gpt2", "torch", "gemma")
every_model = pytest.mark.parametrize(
    "name", [name if name in COMMON else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)


# Mark of tests on what XLA's CPU backend makes of a program: benchmarks/gpu.py runs the other tests on a GPU.
on_cpu = pytest.mark.skipif(os.environ.get("JAX_PLATFORMS") != "cpu", reason="a property of XLA's CPU backend")


def small(name: str, **changes: Any) -> ModelConfig:
    """Return a tiny model of `MODELS`, with initial weights large enough to avoid values near zero."""
    base = {"vocab_size": 17, "block_size": 12, "n_layer": 2, "n_embd": 16, "init_std": 0.3}
    heads = {} if MODELS[name].n_head == 1 else {"n_head": 4}
    return replace(MODELS[name], **(base | heads | changes))


def make(config: ModelConfig, seed: int = 0) -> tuple[GPT, Any]:
    """Make a model and random weights, none zero and gains near one. NumPy draws them, so nothing is compiled."""
    rng = np.random.default_rng(seed)
    residual = math.sqrt(2 * config.n_layer)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        module = path[-2].key
        name = path[-1].key
        if name == "scale":
            values = rng.normal(1, 0.05, leaf.shape)
        elif name == "bias":
            values = rng.normal(0, 0.05, leaf.shape)
        else:
            values = rng.normal(0, config.init_std / (residual if module in ("o_proj", "down_proj") else 1), leaf.shape)
        return jnp.asarray(values, leaf.dtype)

    return GPT(config), jax.tree_util.tree_map_with_path(draw, abstract_params(config))


def compiled(model: Any, params: Any, *args: Any, method: str = "__call__") -> Any:
    """Apply a model in one program: without `jit`, each operation is compiled separately, which takes 5x the CPU time.

    Numbers in `args`, such as the slots of a cache, are static.
    """
    numbers = tuple(i for i, each in enumerate(args, 1) if isinstance(each, int))
    return jax.jit(partial(model.apply, method=method), static_argnums=numbers)({"params": params}, *args)


def lm_of(name: str, **changes: Any) -> LM:
    """Make a tiny model of `MODELS` with random weights, and a tokenizer of ids."""
    config = small(name, **changes)
    return LM(Config(model=config), make(config)[1], make_tokenizer("ids", "", 0, config.vocab_size))


class Counted(NamedTuple):
    """A cache that counts the passes of `CountUp`."""

    passes: jax.Array
    length: jax.Array
    position_BS: Any = np.zeros((1, 1), np.int32)
    layers: tuple[()] = ()

    @property
    def size(self) -> int:
        return 0


@dataclass(frozen=True)
class CountUp:
    """A model that always predicts the next id modulo 10."""

    config = ModelConfig(vocab_size=10, positions="rope")

    def apply(self, _: Any, *args: Any, method: Any) -> Any:
        return getattr(self, method.__name__)(*args)

    def prefill(self, ids_BT: jax.Array, slots: int) -> Any:
        return self.extend(ids_BT, Counted(jnp.int32(0), jnp.int32(0)))

    def extend(self, ids_BT: jax.Array, cache: Counted) -> tuple[jax.Array, Counted]:
        cache = cache._replace(passes=cache.passes + 1, length=cache.length + ids_BT.shape[1])
        return jax.nn.one_hot((ids_BT + 1) % 10, 10) * 100, cache


def random_ids(config: ModelConfig, shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, shape), jnp.int32)


def packed_rows(config: ModelConfig, rows: int, seed: int) -> np.ndarray:
    """Return rows of two documents and four positions of padding, int32 `[B, 16, 3]`."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, (rows, 17))
    documents = np.repeat([0, 1, -1], [5, 7, 4])
    inputs = np.where(documents < 0, -1, ids[:, :-1])
    targets = np.where(np.isin(np.arange(16), [4, 11]) | (documents < 0), -1, ids[:, 1:])
    return np.stack([inputs, targets, np.broadcast_to(documents, inputs.shape)], -1).astype(np.int32)


def splash_on_a_cpu(*args: Any) -> jax.Array:
    """Compute `splash_attention` in Pallas' interpreter."""
    with interpreted_splash():
        return splash_attention(*args)


@contextlib.contextmanager
def interpreted_splash() -> Iterator[None]:
    """Run splash kernels in Pallas' interpreter."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a slow import, 1 s

    with contextlib.ExitStack() as stack:
        for name in ("make_splash_mha", "make_splash_mha_single_device"):
            stack.enter_context(patch.object(splash, name, partial(getattr(splash, name), interpret=True)))
        yield


def cudnn_on_a_cpu(*args: Any) -> jax.Array:
    """Compute `cudnn_attention` with the same function of JAX, compiled by XLA."""
    attention = jax.nn.dot_product_attention

    def by_xla(*qkv: jax.Array, **options: Any) -> jax.Array:
        return attention(*qkv, **options | {"implementation": "xla"})

    with patch.object(jax.nn, "dot_product_attention", by_xla):
        return cudnn_attention(*args)


def small_run(**train: Any) -> Config:
    """Return the config of a run of a few seconds on `TEXT`, which the caller writes to text.txt."""
    settings = {"steps": 8, "batch_size": 8, "eval_every": 4, "log_every": 1, "sample_tokens": 5, "prompt": "1"} | train
    return Config(
        preset="python-char",
        model=small("statquest", vocab_size=0, block_size=16, n_layer=1),
        data=DataConfig(path="text.txt"),
        optim=OptimConfig(warmup_steps=2),
        train=TrainConfig(**settings),
        mesh=MeshConfig(data=1),
    )


class Result:
    """The result of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def jaxgpt(*args: str) -> Result:
    """Run a command in this process."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(args)
        except SystemExit as e:
            code = int(e.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def parsed(name: str, *words: str) -> dict[str, Any]:
    """Return the arguments that the function of a command would receive; for help, the arguments of the help printer."""
    _, bound = parse([*name.split(), *words])
    bound.apply_defaults()
    return bound.arguments


def flags(**values: Any) -> list[str]:
    """`flags(model__n_layer=2)` is `["--model.n-layer", "2"]`."""
    out = []
    for name, value in values.items():
        out += ["--" + name.replace("__", ".").replace("_", "-"), str(value)]
    return out


def nodes(source: str) -> list[ast.AST]:
    """Return the nodes of a program. CPython 3.11's parser fails if a finalizer formats a traceback meanwhile."""
    gc.disable()
    try:
        return list(ast.walk(ast.parse(source)))
    finally:
        gc.enable()


def repository() -> Path:
    return Path(__file__).parents[1]


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of written files, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def comparable(run: str | Path) -> list[dict[str, Any]]:
    """Read the part of a run's metrics.jsonl that is equal in identical runs, without start lines, end lines and times."""
    times = ("elapsed_seconds", "tokens_per_second", "mfu", "val_seconds", "data_wait_seconds")
    path = Path(run, "metrics.jsonl")
    found = read_metrics(path) if path.exists() else ()
    lines = [line for line in found if "started" not in line and "ended" not in line]
    return [{name: value for name, value in line.items() if name not in times} for line in lines]
