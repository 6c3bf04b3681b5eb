"""Compare LoRA with merged weights to LoRA with two products: `python benchmarks/lora.py`.

`jaxgpt train` uses merged weights.

merged:       y = x (W + s A B). A B is computed once per forward pass; the gradient of W + s A B is a full matrix.
two products: y = x W + s (x A) B. No gradient is a full matrix, but each adapted matrix needs two more products, and
              x A is kept for the backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.kernels import of_device
from jaxgpt.model import GPT
from jaxgpt.model.init import init_params
from jaxgpt.model.linear import Linear
from jaxgpt.model.lora import init_lora, matrices, merge
from jaxgpt.model.params import count_parameters
from jaxgpt.runtime import set_quick_flag
from jaxgpt.train.loss import cross_entropy

MODEL = ModelConfig(
    vocab_size=4096, block_size=256, n_layer=8, n_head=8, n_embd=512, positions="rope", norm="rmsnorm", bias=False
)
RANK, ALPHA, B, REPEATS = 8, 16.0, 8, 5


def two_products(adapters: Any) -> Callable[..., Any]:
    """Return a Flax Linen method interceptor that adds `s (x A) B` to the output of each adapted matrix."""

    def add(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        y = call(*args, **kwargs)
        if not isinstance(context.module, Linear):
            return y
        *path, name = context.module.path
        adapter = adapters
        for part in (*path, name):
            adapter = adapter.get(part, {})
        if "a" not in adapter:
            return y
        a, b = adapter["a"], adapter["b"][name]
        return y + ALPHA / RANK * args[0] @ a @ b

    return add


def main() -> None:
    """Print time and temporary memory of the loss and gradient, for all weights and each form of LoRA."""
    set_quick_flag()
    model = GPT(MODEL, of_device(jax.local_devices()[0]))
    params = init_params(model)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, MODEL.vocab_size, (B, MODEL.block_size + 1)), jnp.int32)

    def loss(weights: Any, ids: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": weights}, ids[:, :-1])
        return cross_entropy(logits, ids[:, 1:]).mean()

    def merged(adapters: Any, params: Any, ids: jax.Array) -> jax.Array:
        return loss(merge(params, adapters, ALPHA), ids)

    def separate(adapters: Any, params: Any, ids: jax.Array) -> jax.Array:
        with nn.intercept_methods(two_products(adapters)):
            return loss(params, ids)

    def full(weights: Any, _: Any, ids: jax.Array) -> jax.Array:
        return loss(weights, ids)

    print(
        f"{jax.devices()[0].device_kind}, {count_parameters(MODEL):,} parameters, {B} x {MODEL.block_size} tokens, rank {RANK}"
    )
    rows: dict[str, tuple[Any, Any]] = {"all weights": (full, params)}
    for names in (("q_proj", "v_proj"), tuple(matrices(params))):
        adapters = init_lora(jax.random.key(0), params, RANK, names)
        label = "q, v" if len(names) == 2 else "all matrices"
        rows |= {f"{label}: merged": (merged, adapters), f"{label}: two products": (separate, adapters)}
    compiled = {}
    for label, (function, trained) in rows.items():
        call = jax.jit(jax.value_and_grad(function)).lower(trained, params, ids).compile()
        compiled[label] = partial(call, trained, params, ids), call.memory_analysis().temp_size_in_bytes
        jax.block_until_ready(compiled[label][0]())
    seconds: dict[str, list[float]] = {label: [] for label in rows}
    for _ in range(REPEATS):  # interleaved rows, so that changes in the machine's speed affect all rows
        for label, (run, _) in compiled.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            seconds[label].append(time.perf_counter() - began)
    for label, (_, temporary) in compiled.items():
        print(f"{label:26}{np.median(seconds[label]):8.3f} s  {temporary / 2**20:8.0f} MiB temporary")


if __name__ == "__main__":
    main()
