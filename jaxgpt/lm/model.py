"""A trained model: config, weights and tokenizer, read from a run directory or written to one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxgpt.checkpoint.run import Run, complete_run, open_run, parse_checkpoint
from jaxgpt.checkpoint.store import checkpoints, read_params, save_params
from jaxgpt.config import Config, DataConfig, LoraConfig, ModelConfig
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.decoding import Sampler, SamplingParams, TokenBuffer
from jaxgpt.errors import UserError, short_repr
from jaxgpt.kernels import of_device
from jaxgpt.lm.weights import Precision, quantize
from jaxgpt.model import GPT
from jaxgpt.model.lora import abstract_trained, merge
from jaxgpt.model.params import abstract_params, flatten_params, map_matrices
from jaxgpt.model.scan import STACKED, unstack_layers
from jaxgpt.ops import Ops
from jaxgpt.parallel.mesh import use_mesh
from jaxgpt.settings import as_int


class LM(NamedTuple):
    """A trained model, from `load` or built as `LM(config, params, tokenizer)`.

    Attributes:
        config: model and training settings; after `load`, from the run.
        params: weights, or their EMA if the run computes it, as nested dicts of arrays (or of `Stored`, see `load`).
        tokenizer: converts text to ids and back.
        source: run and step that the model was loaded from; empty: built in Python.
    """

    config: Config
    params: Any
    tokenizer: Tokenizer
    source: str = ""

    def __repr__(self) -> str:
        """Format the model in one line, without its weights."""
        return f"<LM: {self.config.model.parameters:,} parameters, {self.source or 'made in Python'}>"


class FrozenBase(NamedTuple):
    """Frozen weights of a run with adapters, and their checksum."""

    params: Any
    checksum: str


def load(path: str | Path, checkpoint: str | int = "best", weights: Precision | None = None) -> LM:
    """Read a run directory; the adapters of a LoRA run are merged with its base.

    After merging, the config has no adapters.

    Args:
        path: run directory of `jaxgpt train`, `jaxgpt import` or `save`.
        checkpoint: `best` (lowest validation loss; without losses: the last), `last`, or a step.
        weights: precision of matrices stored for decoding (float32, bfloat16 or int8), as in `jaxgpt sample`: faster
            on a CPU; bfloat16 and int8 take less memory. None: arrays, as trained.

    Raises:
        UserError: if an argument is invalid, the run, checkpoint or base is missing or damaged, or the base has changed.
    """
    if weights is not None and weights not in get_args(Precision):
        raise UserError(f"weights {short_repr(weights)} is not supported: use one of {', '.join(get_args(Precision))}")
    if not isinstance(checkpoint, str):
        checkpoint = str(as_int("checkpoint (best, last or a step)", checkpoint, 0, 2**63 - 1))
    run, config, params, base, step = _read(path, checkpoint)
    if base is not None:
        params, config = merge(base, params, config.lora.alpha), replace(config, lora=LoraConfig())
    params = params if weights is None else quantize(params, config.model, weights)
    return LM(config, params, run.tokenizer(), f"{path}, step {step}")


def load_adapters(path: str | Path, checkpoint: str) -> tuple[Config, Any, Any]:
    """Read the config, frozen weights and adapters of a run; raise `UserError` if it has no adapters."""
    _, config, adapters, base, _ = _read(path, checkpoint)
    if base is None:
        raise UserError(f"{path} has no adapters: it was not trained with --lora.rank")
    return config, base, adapters


def load_base(path: str | Path, model: ModelConfig) -> tuple[FrozenBase, Tokenizer]:
    """Read the base weights of adapters, and their tokenizer, from a run or RUN/checkpoints/STEP.

    The adapters of a LoRA run are first merged with its base. Raises `UserError` if the architecture differs from `model`.
    """
    _, params, tokenizer, _ = load(*parse_checkpoint(str(path)))
    if difference := _difference(params, model):
        raise UserError(
            f"{path} is not the base of these adapters: its architecture differs ({difference}); restore the "
            f"original base"
        )
    return FrozenBase(params, checksum(params)), tokenizer


def base_checkpoint(run: Run, config: Config) -> Path | None:
    """Return the base checkpoint of a run's adapters (recorded path or next to the run); None if missing."""
    recorded, step = parse_checkpoint(config.init_from)
    places = [path / "checkpoints" / step for path in (recorded, run.path.absolute().parent / recorded.name)]
    return next(filter(Path.is_dir, places), None)


def needed_runs(run: Run | None) -> set[Path]:
    """Return the paths of a run and of the bases of its adapters: loading the run reads them all."""
    paths = set[Path]()
    while run and run.path.resolve() not in paths:
        paths.add(run.path.resolve())
        config = run.config() if run.exists() else None
        base = base_checkpoint(run, config) if config and config.lora.rank else None
        run = Run(base.parent.parent) if base else None
    return paths


def base_of(run: Run, config: Config) -> tuple[FrozenBase, Tokenizer]:
    """Read the base of a run's adapters.

    Raises `UserError` if the base is missing or needs the run itself, or its weights changed since the adapters were trained.
    """
    path = base_checkpoint(run, config)
    if path is None:
        raise UserError(
            f"{run.path} holds adapters of {config.init_from}, which is missing: restore it, or move it next to {run.path}"
        )
    if run.path.resolve() in needed_runs(Run(path.parent.parent)):
        raise UserError(f"{path}, the base of {run.path}, needs {run.path} itself: restore the run {config.init_from}")
    base, tokenizer = load_base(path, config.model)
    if any(info.about.get("base", base.checksum) != base.checksum for info in checkpoints(run.checkpoints).values()):
        raise UserError(f"{path} is not the base of {run.path}: its weights differ from the original: restore it")
    return base, tokenizer


def checksum(tree: Any) -> str:
    """Compute the SHA-256 of weights: their paths in the tree, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _read(path: str | Path, checkpoint: str) -> tuple[Run, Config, Any, Any, int]:
    """Read a run: its config, trained parameters (or their EMA), base of the adapters or None, and step."""
    run = open_run(_as_path(path))
    config = run.config()
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract_trained(config.model, config.lora),
    )
    params, step = read_params(run.checkpoints, checkpoint, abstract, "ema" if config.optim.ema_decay else "params")
    if not config.lora.rank:
        return run, config, params, None, step
    base, _ = base_of(run, config)
    return run, config, params, base.params, step


def _as_path(path: str | Path) -> Path:
    if not isinstance(path, (str, Path)):
        raise UserError(f"the path of a run must be a string or a Path: {short_repr(path)}")
    return Path(path)


def _difference(params: Any, model: ModelConfig) -> str:
    """Return the first difference in name, shape or dtype between weights and a model, or ""."""
    found, expected = (
        {name: f"{getattr(leaf, 'dtype', type(leaf).__name__)} {list(np.shape(leaf))}" for name, leaf in leaves.items()}
        for leaves in (flatten_params(params), flatten_params(abstract_params(model)))
    )
    for name in expected | found:
        if found.get(name) != expected.get(name):
            return f"weight {name} is {found.get(name, 'missing')}, but {expected.get(name, 'unknown')} in the model"
    return ""


def save(lm: LM, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a model as a run directory for `load` and the commands (sample, eval, export, ...).

    The run appears at `path` when it is complete. Its only checkpoint is of step 0, without optimizer state: start training
    from it with `--init-from`, not with `--resume`.

    Args:
        lm: the model. Its weights must be float32, per layer (`h_0`, `h_1`, ...) or stacked (`h`). A config without data
            settings (`DataConfig()`, and no preset) is written with the dataset `none`: `eval` then needs `--data.path`.
        path: directory to write; its parents are created.
        overwrite: replace a run at `path`. Other files in its directory are kept.

    Raises:
        UserError: if the weights do not match `lm.config.model`, the tokenizer has more ids than the model, or `path`
            holds a run (without `overwrite`) or cannot be written.
        TrainingFailed: if the checkpoint cannot be written, for example because the disk is full.
    """
    check_lm(lm)
    config, params, tokenizer, _ = lm
    model, path = config.model, _as_path(path)
    if model.vocab_size < max(tokenizer.vocab_size, 1):
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids, and model.vocab_size is {model.vocab_size}: use a config and "
            f"weights for at least as many ids"
        )
    params = nn.unbox(params)
    if STACKED in params:
        params = unstack_layers(params, model.n_layer)
    if difference := _difference(params, model):
        raise UserError(f"{difference} of lm.config: pass the training config, or convert the weights with astype")
    # Otherwise `load` would look for an EMA, or for adapters.
    config = replace(config, optim=replace(config.optim, ema_decay=0.0), lora=LoraConfig())
    if not config.preset and config.data == DataConfig():
        config = replace(config, data=DataConfig(dataset="none", tokenizer=str(path / "tokenizer.json")))
    with complete_run(path, config, tokenizer, overwrite) as run:
        save_params(run.checkpoints, params, {"config": asdict(config)})


def sampler_of(
    lm: LM, sampling: SamplingParams | None = None, stop_ids: tuple[int, ...] = (), ops: Ops | None = None
) -> Sampler:
    """Return a model's sampler; by default, `ops` comes from `of_device` for the first local device."""
    ops = of_device(jax.local_devices()[0], lm.config.train.compute_dtype) if ops is None else ops
    filters = (only,) if (only := only_text(lm)).kept else ()
    return Sampler(GPT(lm.config.model, ops), sampling or SamplingParams(), stop_ids, filters)


@dataclass(frozen=True)
class OnlyIds:
    """A filter that removes ids from the vocabulary; equal filters share compiled programs."""

    kept: bytes  # one byte per id, 0 for a removed id; empty: keep all
    __name__ = "ids with text"  # name of the filter in `stages`

    def __call__(self, logits: jax.Array, text: TokenBuffer | None = None) -> jax.Array:
        """Set the logits of removed ids to -inf, `[..., V]`."""
        return jnp.where(np.frombuffer(self.kept, np.bool_), logits, -jnp.inf) if self.kept else logits


def only_text(lm: LM) -> OnlyIds:
    """Return a filter that removes ids without text, such as the padding of a vocabulary."""
    found = lm.tokenizer.has_text(lm.config.model.vocab_size)
    return OnlyIds(b"" if found.all() else found.tobytes())


def check_lm(lm: Any) -> None:
    """Raise `UserError` unless an argument is an LM with a config and weights."""
    if not isinstance(lm, LM):
        raise UserError(f"the model must be an LM, as jaxgpt.load(path) returns it: {short_repr(lm)}")
    if not isinstance(lm.config, Config) or not isinstance(lm.params, Mapping):
        kinds = [type(each).__name__ for each in (lm.config, lm.params)]
        raise UserError(f"an LM needs a Config and a dict of weights, not {kinds[0]} and {kinds[1]}")


def for_decoding(lm: LM) -> LM:
    """Check that an argument is an LM, and prepare its weights: unstacked and converted.

    Float32 matrices and tables get the compute dtype, so that steps do not convert them again; the logits are bit-for-bit
    unchanged.
    """
    check_lm(lm)
    dtype, params = lm.config.train.compute_dtype, lm.params
    if STACKED in params:
        params = unstack_layers(params, lm.config.model.n_layer)
    return lm._replace(params=map_matrices(lambda w: w.astype(dtype), params, lm.config.model))


def mesh_of(lm: LM) -> Mesh | None:
    """Return the mesh of the weights if they are on several devices, otherwise None."""
    sharding = getattr(jax.tree.leaves(lm.params)[0], "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1:
        return cast(Mesh, sharding.mesh)
    return None


def cache_shards(lm: LM, rows: int) -> tuple[int, int]:
    """Return over how many devices `placed` shards a cache, and the number of devices."""
    if (mesh := mesh_of(lm)) is None:
        return 1, 1
    row_shards, tensor = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"]
    by_rows, by_heads = rows % row_shards == 0, lm.config.model.kv_heads % tensor == 0
    return (row_shards if by_rows else 1) * (tensor if by_heads else 1), mesh.size


def placed(lm: LM, rows: int) -> AbstractContextManager[None]:
    """Return a context manager with the mesh of the weights, if they are on several devices.

    The `rows` of a batch are sharded over data and fsdp if the product of their sizes divides `rows`, otherwise replicated.
    """
    mesh = mesh_of(lm)
    return use_mesh(mesh, lm.config.model, rows=rows) if mesh else nullcontext()
