"""Read adapters from the files of a PEFT adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgpt.config import LoraConfig, ModelConfig
from jaxgpt.convert.files import Weights, open_safetensors
from jaxgpt.convert.peft.config import CONFIG, MERGE, read_config
from jaxgpt.convert.peft.target_modules import WEIGHTS, TargetModule, TensorNames, modules_if_any
from jaxgpt.convert.tensor_layout import to_leaves
from jaxgpt.errors import UserError


class PeftAdapter(NamedTuple):
    """The adapters of a PEFT directory."""

    lora: LoraConfig
    adapters: Any  # tree of float32 arrays, as from `model.lora.init_lora`


class StoredAdapter(NamedTuple):
    """A module with an adapter in the files, and the names of its tensors there."""

    module: TargetModule
    names: TensorNames


def read_adapter(directory: Path, model: ModelConfig) -> PeftAdapter:
    """Read the adapters of a PEFT directory, and their settings; raise `UserError` for unsupported features or models."""
    scale = read_config(directory / CONFIG)
    file = directory / WEIGHTS
    weights = open_safetensors(file if file.is_file() else directory)
    stored = _find_adapters(weights, model)
    _check_tensors(weights, stored, scale.rank)

    leaves: dict[str, np.ndarray] = {}
    for module, names in stored:
        path = "/".join([*module.parents, module.target])
        a_RI = weights.read(names.a)
        leaves[f"{path}/a"] = np.ascontiguousarray(a_RI.T)
        b_OR = weights.read(names.b)
        shapes = {name: (scale.rank, width) for name, width in module.outputs.items()}
        for name, b_RO in to_leaves(module.layout_of_b, b_OR, shapes).items():
            leaves[f"{path}/b/{name}"] = np.ascontiguousarray(b_RO)
    targets = dict.fromkeys(module.target for module, _ in stored)
    lora = LoraConfig(rank=scale.rank, alpha=scale.alpha, targets=",".join(targets))
    return PeftAdapter(lora, unflatten_dict(leaves, sep="/"))


def _check_tensors(weights: Weights, stored: Sequence[StoredAdapter], rank: int) -> None:
    """Raise `UserError` if a tensor is unexpected, or has a wrong shape or type."""
    expected: dict[str, tuple[int, ...]] = {}
    for module, names in stored:
        expected[names.a] = (rank, module.inputs)
        expected[names.b] = (sum(module.outputs.values()), rank)
    for name in weights.tensors:
        if name not in expected:
            raise UserError(
                f"{weights.path}: tensor {name} is unexpected, because it is not an adapter of a matrix of the base: {MERGE}"
            )
    weights.check(expected)


def _find_adapters(weights: Weights, model: ModelConfig) -> list[StoredAdapter]:
    """Return the adapters in the files, in the order of the modules.

    Raises:
        UserError: if no module has an adapter, an expert has an adapter, a matrix has adapters only in some layers, or two
            tensors adapt one matrix.
    """
    of_experts = [name for name in weights.tensors if ".experts." in name]
    if of_experts:
        raise UserError(f"{weights.path}: adapters of experts, such as {of_experts[0]}, are not supported: {MERGE}")
    modules = [module for module in modules_if_any(model) if not module.is_expert]
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
