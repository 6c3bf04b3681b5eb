"""Map the matrices and adapters of a jaxgpt model to the transformers modules that PEFT can adapt.

PEFT names an adapter after the transformers module that it changes, so the model family's table of tensors also maps adapters.
`lora_A.weight` is A transposed, `[r, inputs]`, and `lora_B.weight` is B transposed, `[outputs, r]`. GPT-2's fused `c_attn`
has one A for queries, keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.convert.families import express_in_family
from jaxgpt.convert.tensors import TensorRow, expand, leaf_shapes
from jaxgpt.errors import UserError

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


class TensorNames(NamedTuple):
    """The names of the two tensors of an adapter."""

    a: str
    b: str


class MatrixAdapter(NamedTuple):
    """A jaxgpt adapter, of one matrix or of several matrices with the same input."""

    a: np.ndarray  # A, [inputs, r]
    b: dict[str, np.ndarray]  # B, [r, outputs], keyed by the name of its matrix


class TargetModule(NamedTuple):
    """A transformers module that PEFT can adapt, such as GPT-2's c_attn (q_proj, k_proj and v_proj)."""

    name: str  # path of the module, `transformer.h.0.attn.c_attn`
    bare: str  # its path in a model without head, `h.0.attn.c_attn`
    parents: list[str]  # path of the jaxgpt module with its matrices, `["h_0", "attn"]`
    inputs: int  # number of inputs
    outputs: dict[str, int]  # number of outputs of each matrix, keyed by name, `{"q_proj": 768, ...}`
    is_expert: (
        bool  # whether the module belongs to one expert, so that its matrix is a part of a stack `[E, inputs, outputs]`
    )
    layout_of_b: TensorRow  # layout of PEFT's tensor B; its leaves are the names of the matrices

    @property
    def target(self) -> str:
        """Names of this module's matrices, joined by + as in `lora.targets`."""
        return "+".join(self.outputs)

    @property
    def tensors(self) -> TensorNames:
        """Names of A and B in PEFT."""
        return TensorNames(f"{PREFIX}{self.name}.lora_A.weight", f"{PREFIX}{self.name}.lora_B.weight")

    def adapters(self, tree: Any) -> list[MatrixAdapter]:
        """Return the adapters of this module's matrices in a tree of adapters (`model.lora.init_lora`)."""
        siblings = tree
        for name in self.parents:
            siblings = siblings.get(name, {})
        own = []
        for sibling in siblings.values():
            if self.outputs.keys() & sibling.get("b", {}).keys():
                own.append(MatrixAdapter(sibling["a"], sibling["b"]))
        return own


def target_modules(model: ModelConfig) -> list[TargetModule]:
    """Return the transformers modules of a model's matrices; raise `UserError` if no family fits."""
    family, exported = express_in_family(model)
    kernels = {leaf: shape for leaf, shape in leaf_shapes(model).items() if leaf.endswith("/kernel")}
    rows = [row for row in expand(family.form.table, exported) if row.leaves[0].endswith("/kernel")]

    differ = kernels.keys() ^ {leaf for row in rows for leaf in row.leaves}
    if differ:
        names = ", ".join(sorted({_matrix_name(leaf) for leaf in differ}))
        raise UserError(
            f"the adapters do not fit the {family.name} model, which has different matrices ({names}): export the merged "
            f"model, without --adapter"
        )

    modules = []
    for row in rows:
        first = row.leaves[0]
        name = row.name.removesuffix(".weight")
        outputs = {_matrix_name(leaf): kernels[leaf][-1] for leaf in row.leaves}
        # PEFT stores B as [outputs, r] in all families.
        layout = row.layout._replace(output_first=True)
        module = TargetModule(
            name=name,
            bare=name.removeprefix(family.form.prefix),
            parents=first.split("/")[:-2],  # h_0/attn/q_proj/kernel -> h_0/attn
            inputs=kernels[first][-2],
            outputs=outputs,
            is_expert=len(kernels[first]) == 3,
            layout_of_b=row._replace(leaves=tuple(outputs), layout=layout),
        )
        modules.append(module)
    return modules


def _matrix_name(leaf: str) -> str:
    """Return the name of the matrix of a leaf: q_proj for h_0/attn/q_proj/kernel."""
    *_, name, _ = leaf.split("/")
    return name


def modules_if_any(model: ModelConfig) -> list[TargetModule]:
    """Return the transformers modules of a model's matrices; [] if no family fits."""
    try:
        return target_modules(model)
    except UserError:
        return []
