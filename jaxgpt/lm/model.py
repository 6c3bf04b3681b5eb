"""A trained model: config, weights and tokenizer, read from a run directory or written to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import flax.linen as nn
import jax
from jax.sharding import Mesh

from jaxgpt.checkpoint.match import first_difference
from jaxgpt.checkpoint.new_run import complete_run
from jaxgpt.checkpoint.paths import as_path
from jaxgpt.checkpoint.placement import Place, check_mesh
from jaxgpt.checkpoint.saver import save_params
from jaxgpt.checkpoint.source import open_source, read_source
from jaxgpt.config import Config, DataConfig, LoraConfig
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.errors import UserError, short_repr
from jaxgpt.lm.weights import Precision, quantize
from jaxgpt.model import GPT
from jaxgpt.model.params import count_parameters
from jaxgpt.model.scan import per_layer
from jaxgpt.runtime import set_quick_flag
from jaxgpt.settings import as_int


class LM(NamedTuple):
    """A trained model, from `load` or built as `LM(config, params, tokenizer)`.

    Attributes:
        config: model and training settings; after `load`, from the run.
        params: weights, or their EMA if the run computes it, as nested dicts of arrays (or of `Stored`, see `load`).
        tokenizer: converts text to ids and back.
        source: run and step that the model was loaded from; empty: built in Python.
        model: class of the model (its architecture is `config.model`): GPT, or a subclass with additional weights or a
            different forward pass.
    """

    config: Config
    params: Any
    tokenizer: Tokenizer
    source: str = ""
    model: type[GPT] = GPT

    @property
    def gpt(self) -> GPT:
        """The model of `config` with the reference operations."""
        return self.model(self.config.model)

    def __repr__(self) -> str:
        """Format the model in one line, without its weights."""
        return f"<LM: {count_parameters(self.gpt):,} parameters, {self.source or 'made in Python'}>"


def load(
    path: str | Path,
    checkpoint: str | int = "best",
    weights: Precision | None = None,
    mesh: Mesh | None = None,
    model: type[GPT] | None = None,
) -> LM:
    """Read a run directory; the adapters of a LoRA run are merged with its base, and removed from the config.

    Args:
        path: run directory of `jaxgpt train`, `jaxgpt import` or `save`.
        checkpoint: `best` (lowest `ranking` of the first evaluator: by default, lowest validation loss; with rewards, highest
            held-out reward; without rankings: the last), `last`, or a step.
        weights: precision of matrices stored for decoding (float32, bfloat16 or int8), as in `jaxgpt sample`: faster
            on a CPU; bfloat16 and int8 take less memory. None: arrays, as trained.
        mesh: devices for the weights, as `jaxgpt.parallel.mesh.make_mesh` returns them; each array is read with its
            sharding. None: the first device.
        model: class of the model, if the run was trained with a subclass of GPT; None: GPT.

    Raises:
        UserError: if an argument is invalid, the run, checkpoint or base is missing or damaged, the base has changed, or the
            run was trained with a subclass of GPT and `model` is None.
    """
    if weights is not None and weights not in get_args(Precision):
        raise UserError(f"weights {short_repr(weights)} is not supported: use one of {', '.join(get_args(Precision))}")
    if mesh is not None:
        check_mesh(mesh)
    if not isinstance(checkpoint, str):
        checkpoint = str(as_int("checkpoint (best, last or a step)", checkpoint, 0, 2**63 - 1))

    set_quick_flag()  # XLA reads the flag when it starts
    place = Place(mesh, model=model)
    source, params = read_source(path, checkpoint, lambda source: source.read(place))

    lm = LM(
        config=replace(source.config, lora=LoraConfig()),  # no adapters: they are merged with the weights
        params=params,
        tokenizer=source.run.tokenizer(),
        source=f"{path}, step {source.step}",
        model=model or GPT,
    )
    if weights is not None:
        lm = lm._replace(params=quantize(params, lm.gpt, weights))
    return lm


class Adapters(NamedTuple):
    """The adapters of a run, and the weights that they were trained on.

    Attributes:
        config: settings of the run.
        base: frozen weights.
        params: the adapters.
    """

    config: Config
    base: Any
    params: Any


def load_adapters(path: str | Path, checkpoint: str) -> Adapters:
    """Read the adapters of a run; raise `UserError` if it has no adapters."""
    source = open_source(path, checkpoint)
    if source.base is None:
        raise UserError(f"{path} has no adapters, as it was not trained with --lora.rank: choose a different run")
    base = source.read_base(Place())
    return Adapters(config=source.config, base=base.params, params=source.read_trained(Place()))


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
    check_tokenizer(lm, "to be saved")
    path = as_path(path)
    _check_vocab_size(lm)
    params = per_layer(nn.unbox(lm.params), lm.config.model.n_layer)
    difference = first_difference(params, lm.gpt)
    if difference:
        raise UserError(f"{difference} of lm.config: pass the training config, or convert the weights with astype")

    config = _config_of_copy(lm.config, path)
    # Record the name of a subclass passed in Python, because `load` needs the class again (`Info.model`).
    given = {} if lm.model is GPT else {"model": lm.model.__name__}
    with complete_run(path, config, lm.tokenizer, overwrite) as run:
        save_params(run.checkpoints, params, {"config": asdict(config), "given": given})


def _check_vocab_size(lm: LM) -> None:
    """Raise `UserError` if the tokenizer has ids that the model lacks, or the model has no ids."""
    ids = lm.tokenizer.vocab_size
    vocab_size = lm.config.model.vocab_size
    if vocab_size < max(ids, 1):
        raise UserError(
            f"the tokenizer has {ids} ids, and model.vocab_size is {vocab_size}: use a config and weights for at least as "
            f"many ids"
        )


def _config_of_copy(config: Config, path: Path) -> Config:
    """Return the settings of a saved model: `load` must not look for an EMA or adapters, or `eval` for data."""
    data = config.data
    if not config.preset and data == DataConfig():
        data = DataConfig(dataset="none", tokenizer=str(path.absolute() / "tokenizer.json"))
    optim = replace(config.optim, ema_decay=0.0)
    return replace(config, data=data, optim=optim, lora=LoraConfig())


def check_lm(lm: Any) -> None:
    """Raise `UserError` unless an argument is an LM with a config and weights."""
    if not isinstance(lm, LM):
        raise UserError(f"the model must be an LM, as jaxgpt.load(path) returns it: {short_repr(lm)}")
    if not isinstance(lm.config, Config) or not isinstance(lm.params, Mapping):
        config_type = type(lm.config).__name__
        params_type = type(lm.params).__name__
        raise UserError(f"an LM needs a Config and a dict of weights, not {config_type} and {params_type}")


def check_tokenizer(lm: LM, purpose: str) -> None:
    """Raise `UserError` if a model was made without its tokenizer."""
    if lm.tokenizer is None:
        raise UserError(f"{purpose}, an LM needs its tokenizer: pass LM(config, params, tokenizer)")


def check_for_text(lm: Any) -> None:
    """Raise `UserError` unless an argument is an LM that can generate text: with a tokenizer, and outside `jax.jit`."""
    check_lm(lm)
    check_tokenizer(lm, "to generate text")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(lm.params)):
        raise UserError(
            "the weights are traced: text is generated by functions of the host, which jit their steps themselves; call them "
            "outside jax.jit and jax.grad"
        )
