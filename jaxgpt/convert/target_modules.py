"""transformers modules that PEFT can adapt, and the matrices of `lora.targets` in them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxgpt.config import LoraConfig, ModelConfig
from jaxgpt.convert.families import exported_form
from jaxgpt.convert.tensors import WeightRow, expand, leaf_shapes
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.model.lora import abstract_trained, matrices
from jaxgpt.model.params import abstract_params

PREFIX = "base_model.model."


class TensorNames(NamedTuple):
    """The names of the two tensors of an adapter."""

    a: str
    b: str


class TargetModule(NamedTuple):
    """A transformers module that PEFT can adapt, such as GPT-2's c_attn (q_proj, k_proj and v_proj)."""

    name: str  # path of the module, `transformer.h.0.attn.c_attn`
    bare: str  # its path in a model without head, `h.0.attn.c_attn`
    parents: list[str]  # path of the jaxgpt module with its matrices, `["h_0", "attn"]`
    inputs: int  # number of inputs
    outputs: dict[str, int]  # number of outputs of each matrix
    row: WeightRow  # layout of B in PEFT

    @property
    def target(self) -> str:
        """Names of this module's matrices, joined by + as in `lora.targets`."""
        return "+".join(self.outputs)

    @property
    def tensors(self) -> TensorNames:
        """Names of A and B in PEFT."""
        return TensorNames(f"{PREFIX}{self.name}.lora_A.weight", f"{PREFIX}{self.name}.lora_B.weight")

    def adapters(self, tree: Any) -> list[Any]:
        """Return the adapters of this module's matrices in a tree, each `{"a": A, "b": {name: B}}`."""
        siblings = functools.reduce(lambda node, name: node.get(name, {}), self.parents, tree)
        return [each for each in siblings.values() if not self.outputs.keys().isdisjoint(each.get("b", {}))]


def target_modules(model: ModelConfig) -> list[TargetModule]:
    """Return the transformers modules of a model's matrices; raise `UserError` if no family fits."""
    family, exported = exported_form(model)
    kernels = {leaf: shape for leaf, shape in leaf_shapes(model).items() if leaf.endswith("/kernel")}
    rows = [row for row in expand(family.form.table, exported) if row.leaves[0].endswith("/kernel")]

    differ = kernels.keys() ^ {leaf for row in rows for leaf in row.leaves}
    if differ:
        names = ", ".join(sorted({leaf.split("/")[-2] for leaf in differ}))
        raise UserError(
            f"the adapters do not fit the {family.name} model, which has different matrices ({names}): export the merged "
            f"model, without --adapter"
        )

    modules = []
    for row in rows:
        outputs = {leaf.split("/")[-2]: kernels[leaf][1] for leaf in row.leaves}
        layout = row._replace(leaves=tuple(outputs), output_first=True)
        first = row.leaves[0]
        name = row.name.removesuffix(".weight")
        module = TargetModule(
            name=name,
            bare=name.removeprefix(family.form.prefix),
            parents=first.split("/")[:-2],
            inputs=kernels[first][0],
            outputs=outputs,
            row=layout,
        )
        modules.append(module)
    return modules


def modules_if_any(model: ModelConfig) -> list[TargetModule]:
    """Return the transformers modules of a model's matrices; [] if no family fits."""
    try:
        return target_modules(model)
    except UserError:
        return []


def resolve_targets(model: ModelConfig, lora: LoraConfig) -> str:
    """Map `lora.targets` to the model's matrix names.

    Names of transformers modules match as in PEFT: `c_proj` is every module of that name, `attn.c_proj` only in attention.
    `all-linear` is every matrix of the blocks. Raises `UserError` if a matrix does not exist, or occurs twice in the result.
    """
    model = replace(model, vocab_size=model.vocab_size or 1)  # 0: unknown until the data is read
    own = matrices(abstract_params(model))
    modules = _targets_of_block(model)

    targets: list[str] = []
    for word in lora.targets.split(","):
        names = _matching_targets(word, own, modules)
        if not names:
            known = list(dict.fromkeys([*own, *(module.split(".")[-1] for module in modules)]))
            raise UserError(
                f"lora.targets {short_repr(word)} is not a matrix of the model{did_you_mean(word, known)}: choose from "
                f"{', '.join(known)}, or all-linear"
            )
        targets += names
    joined = ",".join(dict.fromkeys(targets))
    abstract_trained(model, replace(lora, targets=joined))  # check of the targets, with the errors of init_lora
    return joined


def _targets_of_block(model: ModelConfig) -> dict[str, str]:
    """Return the target of each transformers module of a block: GPT-2 has `{"attn.c_attn": "q_proj+k_proj+v_proj", ...}`."""
    modules = modules_if_any(replace(model, n_layer=1))
    targets = {}
    for module in modules:
        if module.parents:  # not the output head
            _, name = module.name.split(".0.", 1)
            targets[name] = module.target
    return targets


def _matching_targets(word: str, own: Sequence[str], modules: Mapping[str, str]) -> list[str]:
    """Return the targets that a word of `lora.targets` means; [] if it is unknown.

    Args:
        word: all-linear, names of matrices joined by +, or the end of the path of a transformers module.
        own: names of the model's matrices.
        modules: targets by transformers module (`_targets_of_block`).
    """
    if word == "all-linear":
        return list(modules.values()) or [name for name in own if name != "lm_head"]
    if set(word.split("+")) <= set(own):
        return [word]
    return [target for module, target in modules.items() if f".{module}".endswith(f".{word}")]
