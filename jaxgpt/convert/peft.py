"""PEFT adapters: a directory with adapter_config.json and adapter_model.safetensors.

PEFT names an adapter after the transformers module that it changes, so the table of the model's family maps names and shapes:
`lora_A.weight` is A transposed, `[r, inputs]`, and `lora_B.weight` is B transposed, `[outputs, r]`. GPT-2's fused `c_attn`
has one A for queries, keys and values.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.checkpoint.base import checksum
from jaxgpt.checkpoint.run import Run, open_run, parse_checkpoint, write_settings
from jaxgpt.checkpoint.store import resolve_step, save_params
from jaxgpt.config import Config, LoraConfig, ModelConfig
from jaxgpt.convert.files import Weights, new_folder, write_safetensors
from jaxgpt.convert.models import Converted, exported_form, imported_config
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensors import WeightRow, expand, leaf_shapes, nest, tensor_shape, to_leaves, to_tensor
from jaxgpt.convert.weights import check_change, probe_logits
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.files import read_json
from jaxgpt.lm.model import load, load_adapters
from jaxgpt.model.lora import abstract_trained, matrices, merge
from jaxgpt.model.params import abstract_params, flatten_params
from jaxgpt.trainer.metrics import parameter_count

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
HEAD = "lm_head"

# Options that do not change what an adapter computes; init_lora_weights may, by changing the base (see `KEEPS_BASE`).
HARMLESS = """
    auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out inference_mode megatron_core peft_version
    qalora_group_size revision target_modules
""".split()
MERGE = "merge the adapter with PEFT (merge_and_unload), and import the merged model"
# Initializations of the adapters that do not change the weights of the base.
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")


def resolve_targets(model: ModelConfig, lora: LoraConfig) -> str:
    """Map `lora.targets` to the model's matrix names, and check the rank.

    Names of transformers modules match as in PEFT: `c_proj` is every module of that name, `attn.c_proj` only in attention.
    `all-linear` is every matrix of the blocks.

    Raises:
        UserError: if the model has no such matrix, a matrix is named twice, or the rank exceeds a side of a matrix.
    """
    model = replace(model, vocab_size=model.vocab_size or 1)  # it may be unknown until the data is read
    own, theirs = matrices(abstract_params(model)), _modules(model)
    all_linear = list(theirs.values()) or [name for name in own if name != HEAD]
    matches: list[str] = []
    for word in lora.targets.split(","):
        if word == "all-linear":
            names = all_linear
        elif set(word.split("+")) <= set(own):
            names = [word]
        else:
            names = [name for module, name in theirs.items() if f".{module}".endswith(f".{word}")]
        if not names:
            short = dict.fromkeys(module.split(".")[-1] for module in theirs)
            known = list(dict.fromkeys([*own, *short]))
            raise UserError(
                f"lora.targets {short_repr(word)} is not a matrix of the model{did_you_mean(word, known)}: choose from "
                f"{', '.join(known)}, or all-linear"
            )
        matches += names
    targets = ",".join(dict.fromkeys(matches))
    leaves = flatten_params(abstract_trained(model, replace(lora, targets=targets)))
    for path, b in leaves.items():
        adapter, _, name = path.rpartition("/b/")
        if adapter and lora.rank > min(sides := (leaves[f"{adapter}/a"].shape[0], b.shape[1])):
            raise UserError(
                f"lora.rank {lora.rank} exceeds a side of {name}, {sides[0]} x {sides[1]}: choose at most {min(sides)}"
            )
    return targets


def import_adapter(source: Path, target: Path, init_from: str) -> Converted:
    """Write a run at `target` with the adapters of a PEFT directory, on the weights of another run.

    Args:
        source: the directory.
        target: a new path. The run appears atomically.
        init_from: the run of the base model, or one of its checkpoints.

    Raises:
        UserError: if a feature is not supported, or tensors do not match the model.
    """
    path, which = parse_checkpoint(init_from)
    step = resolve_step(open_run(path).checkpoints, which)
    base = load(path, step)
    lora, adapters = read_adapter(source, base.config.model, base.params)
    where = str((Run(path).checkpoints / str(step)).absolute())
    config = imported_config(target, base.config.model, init_from=where, lora=lora)
    with new_folder(target) as folder:
        write_settings(Run(folder), config, base.tokenizer)
        metadata = {"config": asdict(config), "base": checksum(base.params)}
        save_params(Run(folder).checkpoints, jax.tree.map(jnp.asarray, adapters), metadata)
        write_adapter(folder, config, adapters)
        change = _compare(folder, config, base.params, adapters)
        for name in (CONFIG, WEIGHTS):
            (folder / name).unlink()
    return Converted("lora", parameter_count(adapters), change)


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
    config, params, adapters = load_adapters(run, checkpoint)
    with new_folder(target) as folder:
        write_adapter(folder, config, adapters, base)
        change = _compare(folder, config, params, adapters)
    return Converted("lora", parameter_count(adapters), change)


def write_adapter(folder: Path, config: Config, adapters: Any, base: str = "") -> None:
    """Write adapters as PEFT does.

    All modules get the same rank; lower ranks are padded with zeros. Several adapters of a fused module, such as of q_proj and
    v_proj in GPT-2's c_attn, become one adapter with the sum of their ranks and blocks of zeros in B.
    """
    parts = {row: _parts(row, adapters) for row in _matrix_rows(config.model)}
    parts = {row: each for row, each in parts.items() if each}
    rank = max(sum(a.shape[-1] for a, _ in each) for each in parts.values())
    tensors, of_model = {}, leaf_shapes(config.model)
    for row, each in parts.items():
        a_IR = np.concatenate([a for a, _ in each], axis=1)
        b = {leaf: np.zeros((rank, of_model[leaf][1]), np.float32) for leaf in row.leaves}
        first = 0
        for a, of_leaves in each:
            for leaf, value in of_leaves.items():
                b[leaf][first : first + a.shape[-1]] = value
            first += a.shape[-1]
        tensors[f"{PREFIX}{_module(row)}.{A}"] = np.ascontiguousarray(np.pad(a_IR, ((0, 0), (0, rank - first))).T)
        tensors[f"{PREFIX}{_module(row)}.{B}"] = to_tensor(row._replace(output_first=True), b)
    write_safetensors(folder / WEIGHTS, {name: tensor.shape for name, tensor in tensors.items()}, tensors.items())
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or config.init_from,
        "r": rank,
        "lora_alpha": config.lora.alpha / config.lora.rank * rank,
        "target_modules": _shortest(
            {_module(row) for row in parts}, {_module(row) for row in _matrix_rows(config.model)}
        ),
        "fan_in_fan_out": not next(iter(parts)).output_first,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", "utf-8")


def read_adapter(folder: Path, model: ModelConfig, params: Any) -> tuple[LoraConfig, Any]:
    """Read the adapters of a PEFT directory for a model with the weights `params`.

    Raises:
        UserError: if a feature is not supported, or tensors do not match the model.
    """
    rank, alpha = read_config(folder / CONFIG)
    weights, rows, shapes, of_base = Weights(folder), _matrix_rows(model), leaf_shapes(model), flatten_params(params)
    rows = [row for row in rows if any(name.startswith(f"{PREFIX}{_module(row)}.lora_") for name in weights.tensors)]
    if not rows:
        raise UserError(
            f"{weights.path}: none of its {len(weights.tensors)} tensors adapts a matrix of the base: pass the run of "
            f"the model that it was trained on with --init-from"
        )
    targets = list(dict.fromkeys(_target(row) for row in rows))
    rows = [row for row in _matrix_rows(model) if _target(row) in targets]
    expected: dict[str, tuple[int, ...]] = {}
    for row in rows:
        outputs, inputs = tensor_shape(row._replace(output_first=True), shapes)
        expected |= {f"{PREFIX}{_module(row)}.{A}": (rank, inputs), f"{PREFIX}{_module(row)}.{B}": (outputs, rank)}
    copies = _base_tensors(weights, model)
    weights.check(expected | {name: tensor_shape(row, shapes) for name, row in copies.items()}, lambda name: False)
    for name, row in copies.items():
        base = to_tensor(row, {leaf: np.asarray(of_base[leaf]) for leaf in row.leaves})
        # PEFT may have had the base in less precision.
        base = base.astype(DTYPES[weights.tensors[name].dtype]).astype(np.float32)
        if not np.array_equal(base, weights.read(name)):
            what = "embedding" if row.leaves[0].startswith("wte") else "head"
            raise UserError(f"{weights.path}: tensor {name} changes the {what} of the base: not supported; {MERGE}")
    leaves: list[tuple[str, np.ndarray]] = []
    for row in rows:
        path = f"{row.leaves[0].rpartition('/')[0].rpartition('/')[0]}/{_target(row)}".removeprefix("/")
        a_RI = weights.read(f"{PREFIX}{_module(row)}.{A}")
        leaves.append((f"{path}/a", np.ascontiguousarray(a_RI.T)))
        of_b = {leaf: (rank, shapes[leaf][1]) for leaf in row.leaves}
        for leaf, b in to_leaves(
            row._replace(output_first=True), weights.read(f"{PREFIX}{_module(row)}.{B}"), of_b
        ).items():
            leaves.append((f"{path}/b/{leaf.split('/')[-2]}", np.ascontiguousarray(b)))
    return LoraConfig(rank=rank, alpha=alpha, targets=",".join(targets)), nest(leaves)


def read_config(path: Path) -> tuple[int, float]:
    """Read the rank and alpha of an adapter_config.json.

    Raises:
        UserError: if an option is not supported.
    """
    values = read_json(path)
    used = {name: value for name, value in values.items() if value is not False and value not in ("", [], {})}
    options = Options(used, str(path))
    options.only("peft_type", "LORA")
    options.only("task_type", "CAUSAL_LM")
    options.only("bias", "none")
    init = options.take("init_lora_weights")
    if init not in (None, *KEEPS_BASE):
        raise options.refuse("init_lora_weights", init, f"it changes the base's weights; {MERGE}")
    rank, alpha = options.integer("r", 8), options.number("lora_alpha", 8)
    if rank < 1:
        raise options.refuse("r", rank, "it must be at least 1")
    if not alpha > 0:
        raise options.refuse("lora_alpha", alpha, "it must be above 0")
    if options.flag("use_rslora", False):  # the scale is alpha / sqrt(r) instead of alpha / r
        alpha *= math.sqrt(rank)
    options.number("lora_dropout", 0.0)  # only used in training
    options.skip(*HARMLESS)
    options.done(f"not supported for adapters; {MERGE}")
    return rank, alpha


def _compare(folder: Path, config: Config, params: Any, adapters: Any) -> float:
    """Read written adapters, and return the largest change of a logit.

    Raises:
        RuntimeError: if the change exceeds rounding.
    """
    before = probe_logits(config.model, merge(params, adapters, config.lora.alpha))
    lora, back = read_adapter(folder, config.model, params)
    return check_change(before, probe_logits(config.model, merge(params, back, lora.alpha)))


def _matrix_rows(model: ModelConfig) -> list[WeightRow]:
    """Return the rows of the model's table for its matrices, without embeddings.

    Raises:
        UserError: if the model has no equivalent in transformers.
    """
    family, exported = exported_form(model)
    kernels = {leaf for leaf in leaf_shapes(model) if leaf.endswith("/kernel")}
    rows = [row for row in expand(family.form.table, exported) if row.leaves[0].endswith("/kernel")]
    if kernels != {leaf for row in rows for leaf in row.leaves}:
        raise UserError("no transformers family has these matrices: export without --adapter")
    return rows


def _base_tensors(weights: Weights, model: ModelConfig) -> dict[str, WeightRow]:
    """Return the rows of the tensors that are not adapters: the head or embedding, which PEFT writes if adapters change it."""
    family, exported = exported_form(model)
    ends = [row for row in expand(family.form.table, exported) if row.name in (family.form.tied, family.form.head)]
    names = {f"{PREFIX}{_module(row)}{suffix}": row for row in ends for suffix in (".weight", ".base_layer.weight")}
    return {name: row for name, row in names.items() if name in weights.tensors}


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


def _shortest(modules: set[str], known: set[str]) -> list[str]:
    """Shorten the names of modules for PEFT to their last part, or to two parts if another module has the same last part."""

    def ends(module: str, parts: int) -> str:
        return ".".join(module.split(".")[-parts:])

    taken = {ends(module, 1) for module in known - modules}
    return sorted({ends(module, 1 if ends(module, 1) not in taken else 2) for module in modules})
