"""PEFT adapters: a directory with adapter_config.json and adapter_model.safetensors.

PEFT names an adapter after the transformers module that it changes, so the model family's table of tensors also maps adapters.
`lora_A.weight` is A transposed, `[r, inputs]`, and `lora_B.weight` is B transposed, `[outputs, r]`. GPT-2's fused `c_attn`
has one A for queries, keys and values.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgpt.atomic import write_json
from jaxgpt.checkpoint.index import weights_at
from jaxgpt.checkpoint.new_run import check_new_run, complete_run
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.source import Place, open_source
from jaxgpt.checkpoint.store import save_params
from jaxgpt.config import OF_CHATS, Config, LoraConfig, ModelConfig
from jaxgpt.convert import gpt2
from jaxgpt.convert.adapter_tokenizer import adapter_tokenizer
from jaxgpt.convert.card import Export, model_card
from jaxgpt.convert.drafts import new_directory
from jaxgpt.convert.families import exported_form
from jaxgpt.convert.files import Weights, open_safetensors
from jaxgpt.convert.models import Converted, imported_config
from jaxgpt.convert.options import Options
from jaxgpt.convert.original_card import CARD
from jaxgpt.convert.probes import check_change, probe_logits
from jaxgpt.convert.target_modules import TargetModule, TensorNames, modules_if_any, target_modules
from jaxgpt.convert.tensors import to_leaves, to_tensor
from jaxgpt.convert.write_files import Tensor, write_safetensors
from jaxgpt.counts import parameter_count
from jaxgpt.errors import UserError
from jaxgpt.files import read_json
from jaxgpt.lm.model import load_adapters
from jaxgpt.model.lora import merge

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# Harmless options do not change the output of an adapter. init_lora_weights may change the base, and is checked separately.
HARMLESS = """
    auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights
    lora_dropout megatron_core peft_version qalora_group_size revision target_modules task_type
""".split()
BARE_TASK = "FEATURE_EXTRACTION"
MERGE = "merge the adapter with PEFT (merge_and_unload), and import the merged model"
# These values of init_lora_weights do not change the weights of the base, and neither does false.
KEEPS_BASE = (True, "gaussian", "eva", "orthogonal")


def import_adapter(source: Path, target: Path, init_from: str) -> Converted:
    """Write a new run with the adapters of a PEFT directory, on the base `init_from`.

    The base is a run or RUN/checkpoints/STEP. The tokenizer and chat template of the adapter are used if they fit the base;
    otherwise, the result has a note. The new run is created atomically. Raises the errors of `read_adapter`, and `UserError`
    if `target` exists or the base does not exist.
    """
    check_new_run(target)
    where = str(weights_at(init_from).absolute())
    base = open_source(*parse_checkpoint(where))
    model = base.config.model
    lora, adapters = read_adapter(source, model)
    config = imported_config(target, model, init_from=where, lora=lora)
    tokenizer, note = adapter_tokenizer(source, base.run.tokenizer(), model.vocab_size)
    of_chats = {name: getattr(base.config.data, name) for name in OF_CHATS}
    config = replace(config, data=replace(config.data, **of_chats))
    frozen = base.read_frozen(Place())
    with complete_run(target, config, tokenizer) as run:
        metadata = {"config": asdict(config), "base": frozen.checksum}
        save_params(run.checkpoints, jax.tree.map(jnp.asarray, adapters), metadata)
    return Converted("lora", parameter_count(adapters), note=note)


def export_adapter(
    run: str | Path, target: Path, checkpoint: str = "best", base: str = "", license: str = "", repo: str = ""
) -> Converted:
    """Write the adapters of a run as a directory for PEFT's `from_pretrained`, without their base.

    Arguments and errors are as in `export_model`; also raises `UserError` if the run has no adapters. `base` is the
    Hub name or the directory of the base model, recorded for PEFT; empty: `init_from`, the path of the base's checkpoint.
    """
    with new_directory(target) as directory:
        info = open_source(run, checkpoint).info
        config, params, adapters = load_adapters(run, str(info.step))
        model = config.model
        write_adapter(directory, config, adapters, base)
        flag = f"--base {base}" if base else "--adapter"
        command = f"jaxgpt export {Path(run).name} {target.name} --checkpoint {checkpoint} {flag}"
        export = Export(
            run=Path(run),
            info=info,
            config=config,
            name=repo or target.name,
            command=command,
            base=base,
            is_adapter=True,
            license=license,
        )
        (directory / CARD).write_text(model_card(export))
        lora, back = read_adapter(directory, model)
        before = probe_logits(model, merge(params, adapters, config.lora.alpha))
        change = check_change(before, probe_logits(model, merge(params, back, lora.alpha)))
    return Converted("lora", parameter_count(adapters), change)


def write_adapter(directory: Path, config: Config, adapters: Any, base: str) -> None:
    """Write adapters to a directory in PEFT's format.

    All modules get the same rank; lower ranks are padded with zeros. Adapters of one fused module, such as GPT-2's c_attn, are
    merged into one adapter: the ranks add up, and B is block-diagonal.
    """
    found: dict[str, tuple[TargetModule, list[Any]]] = {}
    for module in target_modules(config.model):
        each = module.adapters(adapters)
        if each:
            found[module.name] = (module, each)

    r = config.lora.rank
    most = max(len(each) for _, each in found.values())  # adapters of one module
    rank = r * most
    arrays: dict[str, np.ndarray] = {}
    for module, each in found.values():
        zeros = {name: np.zeros((r, width), np.float32) for name, width in module.outputs.items()}
        a_IR = np.concatenate([adapter["a"] for adapter in each], 1)
        b_OR = np.concatenate([to_tensor(module.row, zeros | adapter["b"]) for adapter in each], 1)
        padding = (0, 0), (0, rank - r * len(each))
        names = module.tensors
        arrays[names.a] = np.pad(a_IR, padding).T
        arrays[names.b] = np.pad(b_OR, padding)
    tensors = [Tensor(name, array.shape, partial(np.asarray, array)) for name, array in arrays.items()]
    write_safetensors(directory / WEIGHTS, tensors)

    family, _ = exported_form(config.model)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or config.init_from,
        "r": rank,
        "lora_alpha": config.lora.alpha * most,  # same scale alpha / r
        "target_modules": sorted(found),
        "fan_in_fan_out": family is gpt2.FAMILY,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    write_json(directory / CONFIG, values)


def read_adapter(directory: Path, model: ModelConfig) -> tuple[LoraConfig, Any]:
    """Read the adapters of a PEFT directory; raise `UserError` for unsupported features or models."""
    rank, alpha = read_config(directory / CONFIG)
    file = directory / WEIGHTS
    weights = open_safetensors(file if file.is_file() else directory)
    adapted = _find_adapted(weights, model)

    expected: dict[str, tuple[int, ...]] = {}
    for module, names in adapted:
        expected[names.a] = (rank, module.inputs)
        expected[names.b] = (sum(module.outputs.values()), rank)
    weights.check(expected)

    leaves: dict[str, np.ndarray] = {}
    for module, names in adapted:
        a_RI = weights.read(names.a)
        b_OR = weights.read(names.b)
        path = "/".join([*module.parents, module.target])
        leaves[f"{path}/a"] = a_RI.T
        shapes = {name: (rank, width) for name, width in module.outputs.items()}
        for name, b_RO in to_leaves(module.row, b_OR, shapes).items():
            leaves[f"{path}/b/{name}"] = b_RO
    contiguous = {path: np.ascontiguousarray(leaf) for path, leaf in leaves.items()}
    targets = dict.fromkeys(module.target for module, _ in adapted)
    lora = LoraConfig(rank=rank, alpha=alpha, targets=",".join(targets))
    return lora, unflatten_dict(contiguous, sep="/")


def _find_adapted(weights: Weights, model: ModelConfig) -> list[tuple[TargetModule, TensorNames]]:
    """Return the modules that have adapters in the files, with the names of their tensors.

    Raises:
        UserError: if there is no such module, or a matrix has adapters only in some layers.
    """
    modules = modules_if_any(model)
    found: dict[str, TensorNames] = {}
    for module in modules:
        names = _names_in(weights, module)
        if names is not None:
            found[module.name] = names
    if not found:
        expected = modules[0].tensors.a if modules else "none, because no transformers family has its matrices"
        raise UserError(
            f"{weights.path}: none of its {len(weights.tensors)} tensors adapts a matrix of the base (found "
            f"{next(iter(weights.tensors), 'none')}, expected {expected}): set --init-from to the run of the model "
            f"that the adapter was trained on"
        )

    targets = {module.target for module in modules if module.name in found}
    wanted = [module for module in modules if module.target in targets]
    for module in wanted:
        if module.name not in found:
            raise UserError(
                f"{weights.path}: {module.target} has adapters only in some layers, not in {module.name}: {MERGE}"
            )
    return [(module, found[module.name]) for module in wanted]


def _names_in(weights: Weights, module: TargetModule) -> TensorNames | None:
    """Return the names of a module's A and B in the files; None if the files have neither.

    If only one of the two is missing, its usual name is returned. The names have a different prefix in an adapter of a bare
    model, or of the text model in a multimodal model. The state dict of a PEFT model contains the names of its adapters:
    `lora_A.default.weight`.
    """
    name_a = _name_in(weights, module.bare, "A")
    name_b = _name_in(weights, module.bare, "B")
    if name_a is None and name_b is None:
        return None
    usual = module.tensors
    return TensorNames(name_a or usual.a, name_b or usual.b)


def _name_in(weights: Weights, bare: str, kind: str) -> str | None:
    """Return the name of A or B of a module in the files, or None."""
    ending = f".{bare}.lora_{kind}.weight"
    names = [name for name in weights.tensors if f".{_unnamed(name)}".endswith(ending) and "vision" not in name]
    if len(names) > 1:
        raise UserError(f"{weights.path}: {names[0]} and {names[1]} adapt the same matrix, {bare}: keep one")
    return names[0] if names else None


def _unnamed(name: str) -> str:
    """Return the name of a tensor without the name of its adapter, `default`."""
    return name.replace(".default.weight", ".weight")


def read_config(path: Path) -> tuple[int, float]:
    """Read the rank and alpha of an adapter_config.json; raise `UserError` for unsupported options."""
    values = read_json(path)
    used = {name: value for name, value in values.items() if value is not False and value not in ("", [], {})}
    options = Options(used, str(path), advice=MERGE)
    options.only("peft_type", "LORA")
    if used.get("task_type") != BARE_TASK:  # an adapter of a model without head has the same tensors
        options.only("task_type", "CAUSAL_LM")
    options.only("bias", "none")
    init = used.get("init_lora_weights")
    if init not in (None, *KEEPS_BASE):
        raise options.refuse("init_lora_weights", init, f"it changes the base's weights; {MERGE}")

    rank = options.read("r", 8)
    alpha = options.read("lora_alpha", 8.0)
    if rank < 1:
        raise options.refuse("r", rank, "it must be at least 1")
    if not alpha > 0:
        raise options.refuse("lora_alpha", alpha, "it must be above 0")
    if options.read("use_rslora", False):  # scale alpha / sqrt(r) instead of alpha / r
        alpha *= math.sqrt(rank)
    options.skip(*HARMLESS)
    options.done()
    return rank, alpha
