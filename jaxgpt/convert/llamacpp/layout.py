"""The names and layout of the tensors in llama.cpp GGUF files, derived from the tables of the transformers families.

A family has one table of tensors, with transformers' names; the gguf package maps them to llama.cpp's names.
"""

from __future__ import annotations

import math

from jaxgpt.config import ModelConfig
from jaxgpt.convert.llamacpp.architectures import Architecture
from jaxgpt.convert.llamacpp.metadata import HEAD
from jaxgpt.convert.tensors import Format, WeightRow

EMBEDDING = "token_embd.weight"
ROUTER = "ffn_gate_inp.weight"  # name of a router in its block; files store it as float32


def layout(architecture: Architecture, config: ModelConfig) -> Format:
    """Return the names and layout of the tensors, from the table of the transformers family.

    Matrices are stored as `[out, in]`; a fused matrix is the concatenation of queries, keys and values. Gains are stored
    without an offset. The matrices of all experts are one tensor, `[E, out, in]`.
    """
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, 1)  # names of a model with one layer
    table = []
    for row in architecture.family.form.table:
        in_first_layer = row.name.replace(".{expert}", "").format(0)
        name = names.get_name(in_first_layer, try_suffixes=(".weight", ".bias"))
        # The map lacks only biases that the architecture does not have.
        if name is None:
            continue
        if "{}" in row.name:
            name = name.replace("blk.0.", "blk.{}.")
        table.append(_stored(architecture, row, name, config))
    return Format(tuple(table), prefix="", tied=EMBEDDING, head=HEAD)


def _stored(architecture: Architecture, row: WeightRow, name: str, config: ModelConfig) -> WeightRow:
    """Return the row of a tensor in llama.cpp's layout."""
    leaf = row.leaves[0]
    is_matrix = leaf.endswith("/kernel")
    is_rotated = "/q_proj/" in leaf or "/k_proj/" in leaf
    factor = 1.0
    if architecture.scales_queries and leaf.endswith("/q_norm/scale"):
        factor = _query_factor(config)
    return WeightRow(
        name,
        row.leaves,
        output_first=is_matrix,
        interleaved=architecture.interleaved and is_rotated,
        factor=factor,
    )


def _query_factor(config: ModelConfig) -> float:
    """Return the factor of the gain of Gemma's query norm.

    llama.cpp divides scores by the square root of the head width. Gemma 3 27B, recognized by its number of layers, is an
    exception: the divisor is the square root of the model width per head.
    """
    if config.n_layer != 62:
        return 1.0
    return math.sqrt(config.head_width / (config.n_embd // config.n_head))
