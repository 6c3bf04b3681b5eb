"""PEFT adapters: a directory with adapter_config.json and adapter_model.safetensors.

PEFT names an adapter after the transformers module that it changes, so the table of the model's family maps names and shapes:
`lora_A.weight` is A transposed, `[r, inputs]`, and `lora_B.weight` is B transposed, `[outputs, r]`. GPT-2's fused `c_attn`
has one A for queries, keys and values.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgpt.checkpoint.base import checksum
from jaxgpt.checkpoint.run import Run, complete_run, open_run, parse_checkpoint
from jaxgpt.checkpoint.store import resolve_step, save_params
from jaxgpt.config import Config, LoraConfig, ModelConfig
from jaxgpt.convert.files import Weights, check_new, new_directory, write_safetensors
from jaxgpt.convert.models import Converted, exported_form, imported_config
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensors import WeightRow, expand, leaf_shapes, tensor_shape, to_leaves, to_tensor
from jaxgpt.convert.weights import check_change, probe_logits
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.files import read_json, write_json
from jaxgpt.lm.model import load, load_adapters
from jaxgpt.model.lora import abstract_trained, matrices, merge
from jaxgpt.model.params import abstract_params
from jaxgpt.trainer.metrics import parameter_count

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"

# Options that do not change what an adapter computes; init_lora_weights may, by changing the base (see `KEEPS_BASE`).
HARMLESS = """
    auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights
    lora_dropout megatron_core peft_version qalora_group_size revision target_modules
""".split()
MERGE = "merge the adapter with PEFT (merge_and_unload), and import the merged model"
# Initializations of the adapters that do not change the weights of the base.
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")


def resolve_targets(model: ModelConfig, lora: LoraConfig) -> str:
    """Map `lora.targets` to the model's matrix names.

    Names of transformers modules match as in PEFT: `c_proj` is every module of that name, `attn.c_proj` only in attention.
    `all-linear` is every matrix of the blocks.

    Raises:
        UserError: if the model has no such matrix, or a matrix is named twice.
    """
    model = replace(model, vocab_size=model.vocab_size or 1)  # it may be unknown until the data is read
    own, theirs = matrices(abstract_params(model)), _modules(model)
    targets: list[str] = []
    for word in lora.targets.split(","):
        if word == "all-linear":
            names = list(theirs.values()) or [name for name in own if name != "lm_head"]
        elif set(word.split("+")) <= set(own):
            names = [word]
        else:
            names = [name for module, name in theirs.items() if f".{module}".endswith(f".{word}")]
        if not names:
            known = list(dict.fromkeys([*own, *(module.split(".")[-1] for module in theirs)]))
            raise UserError(
                f"lora.targets {short_repr(word)} is not a matrix of the model{did_you_mean(word, known)}: choose from "
                f"{', '.join(known)}, or all-linear"
            )
        targets += names
    joined = ",".join(dict.fromkeys(targets))
    abstract_trained(model, replace(lora, targets=joined))  # raises what init_lora would raise
    return joined


def import_adapter(source: Path, target: Path, init_from: str) -> Converted:
    """Write a run at `target` with the adapters of a PEFT directory, on the weights of another run.

    Args:
        source: the directory.
        target: a new path. The run appears atomically.
        init_from: the run of the base model, or one of its checkpoints.

    Raises:
        UserError: if a feature is not supported, or tensors do not match the model.
    """
    check_new(target)
    path, which = parse_checkpoint(init_from)
    step = resolve_step(open_run(path).checkpoints, which)
    base = load(path, step)
    lora, adapters = read_adapter(source, base.config.model)
    where = str((Run(path).checkpoints / str(step)).absolute())
    config = imported_config(target, base.config.model, init_from=where, lora=lora)
    with complete_run(target, config, base.tokenizer) as run:
        metadata = {"config": asdict(config), "base": checksum(base.params)}
        save_params(run.checkpoints, jax.tree.map(jnp.asarray, adapters), metadata)
    return Converted("lora", parameter_count(adapters))


def export_adapter(run: str | Path, target: Path, checkpoint: str = "best", base: str = "") -> Converted:
    """Write the adapters of a run as a directory for PEFT's `from_pretrained`, without their base.

    Args:
        run: a run directory.
        target: a new path. The directory appears atomically, after a comparison with the model.
        checkpoint: `best` (lowest validation loss), `last`, or a step.
        base: name or directory of the base in transformers, for PEFT; empty: the run of the base.

    Raises:
        UserError: if the run has no adapters, its base is missing, or the model has no equivalent in transformers.
        RuntimeError: if the exported adapters compute different logits.
    """
    with new_directory(target) as directory:
        config, params, adapters = load_adapters(run, checkpoint)
        model = config.model
        write_adapter(directory, config, adapters, base)
        lora, back = read_adapter(directory, model)
        before = probe_logits(model, merge(params, adapters, config.lora.alpha))
        change = check_change(before, probe_logits(model, merge(params, back, lora.alpha)))
    return Converted("lora", parameter_count(adapters), change)


def write_adapter(directory: Path, config: Config, adapters: Any, base: str = "") -> None:
    """Write adapters as PEFT does.

    All modules get the same rank; lower ranks are padded with zeros. Adapters of one fused module, such as q_proj and v_proj in
    GPT-2's c_attn, are merged into one adapter: the ranks add up, and B is block-diagonal.
    """
    parts = {row: each for row in _matrix_rows(config.model) if (each := _parts(row, adapters))}
    rank = max(sum(a.shape[-1] for a, _ in each) for each in parts.values())
    tensors, shapes = {}, leaf_shapes(config.model)
    for row, each in parts.items():
        a_IR = np.concatenate([a for a, _ in each], axis=1)
        b = {leaf: np.zeros((rank, shapes[leaf][1]), np.float32) for leaf in row.leaves}
        first = 0
        for a, of_leaves in each:
            for leaf, value in of_leaves.items():
                b[leaf][first : first + a.shape[-1]] = value
            first += a.shape[-1]
        tensors[f"{PREFIX}{_module(row)}.{A}"] = np.pad(a_IR, ((0, 0), (0, rank - first))).T
        tensors[f"{PREFIX}{_module(row)}.{B}"] = to_tensor(row._replace(output_first=True), b)
    write_safetensors(directory / WEIGHTS, {name: tensor.shape for name, tensor in tensors.items()}, tensors.items())
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or config.init_from,
        "r": rank,
        "lora_alpha": config.lora.alpha / config.lora.rank * rank,
        "target_modules": sorted(map(_module, parts)),
        "fan_in_fan_out": not next(iter(parts)).output_first,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    write_json(directory / CONFIG, values)


def read_adapter(directory: Path, model: ModelConfig) -> tuple[LoraConfig, Any]:
    """Read the adapters of a PEFT directory for a model.

    Raises:
        UserError: if a feature is not supported, or tensors do not match the model.
    """
    rank, alpha = read_config(directory / CONFIG)
    weights, rows, shapes = Weights(directory), _matrix_rows(model), leaf_shapes(model)
    adapted = [row for row in rows if any(name.startswith(f"{PREFIX}{_module(row)}.lora_") for name in weights.tensors)]
    if not adapted:
        raise UserError(
            f"{weights.path}: none of its {len(weights.tensors)} tensors adapts a matrix of the base: pass the run of "
            f"the model that it was trained on with --init-from"
        )
    targets = list(dict.fromkeys(map(_target, adapted)))
    rows = [row._replace(output_first=True) for row in rows if _target(row) in targets]
    expected: dict[str, tuple[int, ...]] = {}
    for row in rows:
        outputs, inputs = tensor_shape(row, shapes)
        expected |= {f"{PREFIX}{_module(row)}.{A}": (rank, inputs), f"{PREFIX}{_module(row)}.{B}": (outputs, rank)}
    weights.check(expected, lambda name: False)
    leaves: dict[str, np.ndarray] = {}
    for row in rows:
        parent = row.leaves[0].split("/")[:-2]
        path, of_b = "/".join([*parent, _target(row)]), {leaf: (rank, shapes[leaf][1]) for leaf in row.leaves}
        leaves[f"{path}/a"] = weights.read(f"{PREFIX}{_module(row)}.{A}").T
        for leaf, b in to_leaves(row, weights.read(f"{PREFIX}{_module(row)}.{B}"), of_b).items():
            leaves[f"{path}/b/{leaf.split('/')[-2]}"] = b
    contiguous = {path: np.ascontiguousarray(leaf) for path, leaf in leaves.items()}
    return LoraConfig(rank=rank, alpha=alpha, targets=",".join(targets)), unflatten_dict(contiguous, sep="/")


def read_config(path: Path) -> tuple[int, float]:
    """Read the rank and alpha of an adapter_config.json.

    Raises:
        UserError: if an option is not supported.
    """
    values = read_json(path)
    used = {name: value for name, value in values.items() if value is not False and value not in ("", [], {})}
    options = Options(used, str(path), advice=MERGE)
    options.only("peft_type", "LORA")
    options.only("task_type", "CAUSAL_LM")
    options.only("bias", "none")
    if (init := used.get("init_lora_weights")) not in (None, *KEEPS_BASE):
        raise options.refuse("init_lora_weights", init, f"it changes the base's weights; {MERGE}")
    rank, alpha = options.read("r", 8), options.read("lora_alpha", 8.0)
    if rank < 1:
        raise options.refuse("r", rank, "it must be at least 1")
    if not alpha > 0:
        raise options.refuse("lora_alpha", alpha, "it must be above 0")
    if options.read("use_rslora", False):  # the scale is alpha / sqrt(r) instead of alpha / r
        alpha *= math.sqrt(rank)
    options.skip(*HARMLESS)
    options.done()
    return rank, alpha


def _matrix_rows(model: ModelConfig) -> list[WeightRow]:
    """Return the rows of the model's table for its matrices, without embeddings.

    Raises:
        UserError: if the model has no equivalent in transformers.
    """
    family, exported = exported_form(model)
    kernels = {leaf for leaf in leaf_shapes(model) if leaf.endswith("/kernel")}
    rows = [row for row in expand(family.form.table, exported) if row.leaves[0].endswith("/kernel")]
    if differ := kernels ^ {leaf for row in rows for leaf in row.leaves}:
        names = ", ".join(sorted({leaf.split("/")[-2] for leaf in differ}))
        raise UserError(
            f"the adapters do not fit the {family.name} model, which has different matrices ({names}): export the merged "
            f"model, without --adapter"
        )
    return rows


def _modules(model: ModelConfig) -> dict[str, str]:
    """Map the names of a block's matrices in transformers to targets; {} if no family has the model."""
    try:
        rows = _matrix_rows(replace(model, n_layer=1))
    except UserError:
        return {}
    return {_module(row).split(".0.", 1)[1]: _target(row) for row in rows if ".0." in row.name}


def _module(row: WeightRow) -> str:
    return row.name.removesuffix(".weight")


def _target(row: WeightRow) -> str:
    return "+".join(leaf.split("/")[-2] for leaf in row.leaves)


def _parts(row: WeightRow, adapters: Any) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Return each A of a matrix with its Bs, by leaf."""
    node = adapters
    for name in row.leaves[0].split("/")[:-2]:
        node = node.get(name, {})
    leaves = {leaf.split("/")[-2]: leaf for leaf in row.leaves}
    parts = []
    for adapter in node.values():
        b = {leaves[name]: np.asarray(value) for name, value in adapter.get("b", {}).items() if name in leaves}
        parts += [(np.asarray(adapter["a"]), b)] if b else []
    return parts
