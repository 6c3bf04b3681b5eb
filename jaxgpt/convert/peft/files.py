"""Read and write the files of a PEFT adapter: adapter_config.json and adapter_model.safetensors.

PEFT names an adapter after the transformers module that it changes, so the model family's table of tensors also maps adapters.
`lora_A.weight` is A transposed, `[r, inputs]`, and `lora_B.weight` is B transposed, `[outputs, r]`. GPT-2's fused `c_attn`
has one A for queries, keys and values.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgpt.atomic import write_json
from jaxgpt.config import Config, LoraConfig, ModelConfig
from jaxgpt.convert import gpt2
from jaxgpt.convert.families import express_in_family
from jaxgpt.convert.files import Weights, open_safetensors
from jaxgpt.convert.peft.config import CONFIG, MERGE, Scale, adapter_config, read_config
from jaxgpt.convert.peft.target_modules import TargetModule, TensorNames, modules_if_any, target_modules
from jaxgpt.convert.tensors import to_leaves, to_tensor
from jaxgpt.convert.write_files import Tensor, write_safetensors
from jaxgpt.errors import UserError

WEIGHTS = "adapter_model.safetensors"


class StoredAdapter(NamedTuple):
    """A module with an adapter in the files, and the names of its tensors there."""

    module: TargetModule
    names: TensorNames


def write_adapter(directory: Path, config: Config, adapters: Any, base: str) -> None:
    """Write adapters to a directory in PEFT's format.

    All modules get the same rank; lower ranks are padded with zeros. Adapters of one fused module, such as GPT-2's c_attn, are
    merged into one adapter: the ranks add up, and B is block-diagonal.

    Args:
        directory: directory to write to.
        config: settings of the run.
        adapters: adapters of the run, as `load_adapters` returns them.
        base: name or directory of the base; empty: `init_from`.
    """
    modules = target_modules(config.model)
    by_module = {module.name: module.adapters(adapters) for module in modules}
    most = max(map(len, by_module.values()))  # maximum number of adapters of one module
    rank = config.lora.rank * most

    tensors: list[Tensor] = []
    for module in modules:
        if by_module[module.name]:
            tensors += _merged(module, by_module[module.name], config.lora.rank, rank)
    write_safetensors(directory / WEIGHTS, tensors)

    family, _ = express_in_family(config.model)
    values = adapter_config(
        Scale(rank, config.lora.alpha * most),  # same scale alpha / rank
        modules=[name for name, of_module in by_module.items() if of_module],
        base=base or config.init_from,
        input_first=family is gpt2.FAMILY,
    )
    write_json(directory / CONFIG, values)


def _merged(module: TargetModule, adapters: list[Any], rank: int, padded_rank: int) -> list[Tensor]:
    """Merge the adapters of a module, each of rank `rank`, into PEFT's two tensors of rank `padded_rank`."""
    zeros = {name: np.zeros((rank, width), np.float32) for name, width in module.outputs.items()}
    a_IR = np.concatenate([adapter["a"] for adapter in adapters], 1)
    b_OR = np.concatenate([to_tensor(module.row, zeros | adapter["b"]) for adapter in adapters], 1)
    padding = (0, 0), (0, padded_rank - rank * len(adapters))
    a_RI = np.pad(a_IR, padding).T
    b_OR = np.pad(b_OR, padding)
    names = module.tensors
    return [
        Tensor(names.a, a_RI.shape, partial(np.asarray, a_RI)),
        Tensor(names.b, b_OR.shape, partial(np.asarray, b_OR)),
    ]


def read_adapter(directory: Path, model: ModelConfig) -> tuple[LoraConfig, Any]:
    """Read the adapters of a PEFT directory, and their settings; raise `UserError` for unsupported features or models."""
    scale = read_config(directory / CONFIG)
    file = directory / WEIGHTS
    weights = open_safetensors(file if file.is_file() else directory)
    stored = _find_adapters(weights, model)

    expected: dict[str, tuple[int, ...]] = {}
    for module, names in stored:
        expected[names.a] = (scale.rank, module.inputs)
        expected[names.b] = (sum(module.outputs.values()), scale.rank)
    for name in weights.tensors:
        if name not in expected:
            raise UserError(
                f"{weights.path}: tensor {name} is unexpected, because it is not an adapter of a matrix of the base: {MERGE}"
            )
    weights.check(expected)

    leaves: dict[str, np.ndarray] = {}
    for module, names in stored:
        a_RI = weights.read(names.a)
        b_OR = weights.read(names.b)
        path = "/".join([*module.parents, module.target])
        leaves[f"{path}/a"] = a_RI.T
        shapes = {name: (scale.rank, width) for name, width in module.outputs.items()}
        for name, b_RO in to_leaves(module.row, b_OR, shapes).items():
            leaves[f"{path}/b/{name}"] = b_RO
    contiguous = {path: np.ascontiguousarray(leaf) for path, leaf in leaves.items()}
    targets = dict.fromkeys(module.target for module, _ in stored)
    lora = LoraConfig(rank=scale.rank, alpha=scale.alpha, targets=",".join(targets))
    return lora, unflatten_dict(contiguous, sep="/")


def _find_adapters(weights: Weights, model: ModelConfig) -> list[StoredAdapter]:
    """Return the adapters in the files, in the order of the modules.

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
    return [StoredAdapter(module, found[module.name]) for module in wanted]


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
