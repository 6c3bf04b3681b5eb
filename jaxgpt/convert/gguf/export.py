"""Export a run to a GGUF file for llama.cpp."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.convert.drafts import new_file
from jaxgpt.convert.export_model import Exported
from jaxgpt.convert.exported_tokens import exported_special_tokens
from jaxgpt.convert.families import express_in_family
from jaxgpt.convert.gguf.describe import ALWAYS, describe_tokenizer
from jaxgpt.convert.gguf.writer import check_type, file_type, write_gguf
from jaxgpt.convert.llamacpp import config as llamacpp
from jaxgpt.convert.llamacpp.architectures import Architecture, architecture_of
from jaxgpt.convert.llamacpp.divisors import ROPE_DIVISORS
from jaxgpt.convert.llamacpp.layout import ROUTER, layout
from jaxgpt.convert.probes import check_change, largest_change, probe_logits, reread_logits
from jaxgpt.convert.write_files import Tensor
from jaxgpt.convert.write_weights import tensors_of
from jaxgpt.errors import UserError, reported
from jaxgpt.lm import load
from jaxgpt.model.params import count_parameters


def export_gguf(run: str | Path, target: Path, kind: str = "f32", checkpoint: str = "best") -> Exported:
    """Export a run to a GGUF file for llama.cpp, with its tokenizer.

    Args:
        run: run to convert.
        target: a new path; the file is created atomically, after reading it back and comparing the logits.
        kind: type of the matrices, one of `gguf.writer.TYPES`; vectors and routers are float32.
        checkpoint: `best` (lowest validation loss, or highest held-out reward), `last`, or a step.

    Raises:
        UserError: if the run or checkpoint does not exist, `target` exists, the gguf package is missing, a matrix cannot be
            written as `kind`, or llama.cpp has no equivalent of a setting or of the tokenizer.
        RuntimeError: if the exported model computes different logits, although `kind` is f32 and the activation is unchanged.
    """
    kind = kind.lower()  # llama.cpp's spelling is Q8_0
    check_type(kind)
    with new_file(target) as draft:
        lm = load(run, checkpoint)
        config = lm.config
        params = lm.params
        tokenizer = lm.tokenizer

        family, model = express_in_family(config.model)
        architecture = architecture_of(family.name)
        model = llamacpp.express(architecture, model)

        tokenizer.special = exported_special_tokens(tokenizer, config, ALWAYS)
        described = describe_tokenizer(tokenizer, model.vocab_size)
        metadata = {
            "general.name": _name(run),
            "general.file_type": file_type(kind),
            **llamacpp.config_to_metadata(architecture, model),
            **described.metadata,
        }

        tensors = _tensors(architecture, config.model, model, params)
        types = {tensor.name: _stored_type(tensor, kind) for tensor in tensors}
        with reported(f"cannot write {target}"):
            write_gguf(draft, architecture.name, metadata, tensors, types)

        before = probe_logits(config.model, params)
        del lm, params, tensors
        after = reread_logits(draft)
        # Rounded weights, and GELU computed with tanh, change the logits.
        if kind == "f32" and model.activation == config.model.activation:
            check_change(before, after)
    return Exported(
        family=f"llama.cpp {architecture.name}",
        parameters=count_parameters(config.model),
        max_logit_change=largest_change(before, after),
        engines=("llama.cpp",),
        note=described.note,
    )


def _tensors(architecture: Architecture, original: ModelConfig, model: ModelConfig, params: Any) -> list[Tensor]:
    """List the tensors of a file: the model, a copy of a tied embedding if the file needs a head, and RoPE divisors."""
    if original.tie_embeddings and not model.tie_embeddings:
        params = dict(params) | {"lm_head": {"kernel": np.asarray(params["wte"]["embedding"]).T}}
    tensors = tensors_of(params, model, layout(architecture, model))
    divisors = llamacpp.divisors_of(architecture, model)
    if divisors is not None:
        tensors.append(Tensor(ROPE_DIVISORS, divisors.shape, lambda: divisors))
    return tensors


def _stored_type(tensor: Tensor, kind: str) -> Any:
    """Return the type of a tensor in the file: float32 for vectors and routers, otherwise `kind`.

    Raises:
        UserError: if the rows of a matrix do not consist of complete blocks of the type.
    """
    import gguf

    if len(tensor.shape) == 1 or tensor.name.endswith(f".{ROUTER}"):
        return gguf.GGMLQuantizationType.F32
    chosen = gguf.GGMLQuantizationType[kind.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[chosen]
    if tensor.shape[-1] % block:
        raise UserError(
            f"cannot write {tensor.name} of shape {tensor.shape} as {kind}: its rows are not multiples of {block}; use f16"
        )
    return chosen


def _name(run: str | Path) -> str:
    """Return the name of a model, without "phi3" and "phi-3": they make llama.cpp remove spaces after special tokens."""
    return re.sub("(phi)-?3", r"\1 3", Path(run).name, flags=re.IGNORECASE)
