"""llama.cpp GGUF files: the config of their model, and their dequantized tensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.convert.files import StoredTensor, Weights
from jaxgpt.convert.gguf.header import read_headers
from jaxgpt.convert.llamacpp import config as llamacpp
from jaxgpt.convert.llamacpp.divisors import ROPE_DIVISORS
from jaxgpt.convert.llamacpp.layout import layout
from jaxgpt.convert.read_weights import StoredModel
from jaxgpt.errors import UserError, short_repr


class GgufWeights(Weights):
    """The tensors of a GGUF file or of all parts of a split file, and the metadata.

    Attributes:
        metadata: metadata of the file or of the first part, keyed by name.
        quantized: dict of `gguf.ReaderTensor`, keyed by name.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers. Raises `UserError` for a malformed file, a missing part, or a missing gguf package."""
        headers = read_headers(path)
        tensors: dict[str, StoredTensor] = {}
        quantized: dict[str, Any] = {}
        for header in headers:
            for tensor in header.tensors:
                if tensor.name in tensors:
                    files = f"{tensors[tensor.name].file} and {header.file.name}"
                    raise UserError(f"tensor {tensor.name} is in both {files}: download the parts again")
                shape = tuple(tensor.shape.tolist()[::-1])
                tensors[tensor.name] = StoredTensor(header.file, "F32", shape)  # type after dequantizing
                quantized[tensor.name] = tensor

        metadata = headers[0].metadata
        expected = metadata.get("split.tensors.count")
        if len(headers) > 1 and expected != len(tensors):
            raise UserError(
                f"{path}: its {len(headers)} parts have {len(tensors)} tensors, but split.tensors.count is "
                f"{short_repr(expected)}: download the parts again"
            )
        super().__init__(path, tensors)
        self.metadata = metadata
        self.quantized = quantized

    def _load(self, name: str) -> np.ndarray:
        """Dequantize one tensor to float32. Raises `UserError` if its type is not supported."""
        from gguf.quants import dequantize

        tensor = self.quantized[name]
        try:
            with np.errstate(all="ignore"):  # non-finite numbers, rejected by `read`
                # Copy the data: dequantizing F32 returns its input, and weights must not share memory with the file.
                return np.asarray(dequantize(np.array(tensor.data), tensor.tensor_type), np.float32)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            file = self.tensors[name].file
            raise UserError(f"{file}: tensor {name} has unsupported type {kind}: use a Q8_0 or F16 file") from None


def open_gguf(path: Path, accept: Collection[str] = ()) -> StoredModel:
    """Read the config of a model in a GGUF file, and the headers of its tensors.

    Raises `UserError` for a damaged file or an unsupported model; `accept`: unsupported metadata keys to ignore.
    """
    weights = GgufWeights(path)
    divisors = None
    if ROPE_DIVISORS in weights.tensors:
        divisors = weights.read(ROPE_DIVISORS).reshape(-1)
        del weights.tensors[ROPE_DIVISORS]  # not a weight of the model
    shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
    architecture, config = llamacpp.config_from_metadata(weights.metadata, shapes, divisors, str(path), accept)
    return StoredModel(architecture.name, config, layout(architecture, config), weights)
