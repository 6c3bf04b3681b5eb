"""A run, read from its directory: config, weights, tokenizer; and its model as decoding takes it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Config, ModelConfig
from jaxgpt.data import Tokenizer
from jaxgpt.decoding import Model
from jaxgpt.model import GPT, KVCache, init_cache
from jaxgpt.ops.quantize import Precision, quantize
from jaxgpt.parallel import on_mesh
from jaxgpt.train.build import abstract_params
from jaxgpt.train.checkpoint import read_params
from jaxgpt.train.run import open_run


class LM(NamedTuple):
    """A model ready for use.

    Attributes:
        config: of the run it comes from.
        params: the weights, or their average where the run kept one.
        tokenizer: between text and ids.
    """

    config: Config
    params: Any
    tokenizer: Tokenizer


def load(path: str | Path, checkpoint: str = "best", weights: Precision | None = None) -> LM:
    """Read a run directory.

    Args:
        path: what `jaxgpt train` wrote.
        checkpoint: `best` (lowest validation loss), `last`, or a step.
        weights: lay the matrices out for generation, in this precision, as `jaxgpt sample` does: faster on a CPU, the
            same text in float32, smaller in the others. None: as they were trained, arrays by name.

    Raises:
        UserError: no run, or no such checkpoint.
    """
    run = open_run(Path(path))
    config = run.config()
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract_params(config.model)
    )
    params = read_params(run.checkpoints, checkpoint, abstract, ema=config.optim.ema_decay > 0)
    return LM(config, params if weights is None else quantize(params, weights), run.tokenizer())


@lru_cache(maxsize=16)
def model_functions(config: ModelConfig, dtype: str, has_text: bytes = b"") -> Model:
    """Return the model as decoding takes it; for the same arguments the same functions, so that compiled programs are found.

    Args:
        config: of the model.
        dtype: of matrix products.
        has_text: a byte for each id, 0 where it stands for no text: its logits are -inf. Empty: all ids stand for text.
    """
    model = GPT(config, dtype=jnp.dtype(dtype))
    possible = np.frombuffer(has_text, np.bool_)

    def extend(params: Any, tokens_BT: jax.Array, cache: KVCache, last: bool) -> tuple[jax.Array, KVCache]:
        extended: Any = model.apply({"params": params}, tokens_BT, cache, last, method="extend")
        if possible.all():
            return extended
        logits_BTV, cache = extended
        return jnp.where(possible[None, None], logits_BTV, -jnp.inf), cache

    return Model(extend, lambda start_B, size: init_cache(config, start_B, size, model.dtype))


def functions_of(lm: LM) -> Model:
    """`model_functions` of a run's model, in the type that it was trained in; ids without a text have no probability."""
    has_text = lm.tokenizer.has_text(lm.config.model.vocab_size)
    return model_functions(
        lm.config.model, lm.config.train.compute_dtype, b"" if has_text.all() else has_text.tobytes()
    )


def placed(lm: LM) -> AbstractContextManager[None]:
    """The mesh on which the weights are, where there is more than one device to it."""
    sharding = getattr(jax.tree.leaves(lm.params)[0], "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1:
        return on_mesh(sharding.mesh, lm.config.model)  # type: ignore[arg-type]
    return nullcontext()
