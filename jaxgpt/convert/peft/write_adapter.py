"""Write adapters as the files of a PEFT adapter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.atomic import write_json
from jaxgpt.config import Config
from jaxgpt.convert import gpt2
from jaxgpt.convert.families import express_in_family
from jaxgpt.convert.peft.config import CONFIG, Scale, adapter_config
from jaxgpt.convert.peft.target_modules import WEIGHTS, MatrixAdapter, TargetModule, target_modules
from jaxgpt.convert.tensor_layout import to_tensor
from jaxgpt.convert.write_files import Tensor, write_safetensors
from jaxgpt.errors import UserError


def write_adapter(directory: Path, config: Config, adapters: Any, base: str) -> None:
    """Write adapters to a directory in PEFT's format.

    All modules get the same rank; lower ranks are padded with zeros. Adapters of one fused module, such as GPT-2's c_attn, are
    merged into one adapter: the ranks add up, and B is block-diagonal.

    Args:
        directory: directory to write to.
        config: settings of the run.
        adapters: adapters of the run, as `load_adapters` returns them.
        base: name or directory of the base; empty: `init_from`.

    Raises:
        UserError: if no transformers family has the matrices, or matrices of experts have adapters.
    """
    adapted = [module for module in target_modules(config.model) if module.adapters(adapters)]
    of_experts = sorted({module.target for module in adapted if module.is_expert})
    if of_experts:
        raise UserError(
            f"adapters of experts ({', '.join(of_experts)}) are not converted to PEFT: export the merged model, without "
            f"--adapter"
        )

    most = max(len(module.adapters(adapters)) for module in adapted)  # maximum number of adapters of one module
    rank = config.lora.rank * most
    tensors: list[Tensor] = []
    for module in adapted:
        tensors += _merged(module, module.adapters(adapters), rank)
    write_safetensors(directory / WEIGHTS, tensors)

    family, _ = express_in_family(config.model)
    values = adapter_config(
        Scale(rank, config.lora.alpha * most),  # same scale alpha / rank
        modules=[module.name for module in adapted],
        base=base or config.init_from,
        input_first=family is gpt2.FAMILY,
    )
    write_json(directory / CONFIG, values)


def _merged(module: TargetModule, adapters: Sequence[MatrixAdapter], rank: int) -> list[Tensor]:
    """Merge the adapters of a module into PEFT's two tensors of rank `rank`.

    For example, a fused module with an adapter of q and an adapter of v, before A is transposed:

        A = [ A_q  A_v  0 ]    B = [ B_q  0    0 ]  outputs of q
                                   [ 0    0    0 ]  outputs of k
                                   [ 0    B_v  0 ]  outputs of v
    """
    bs = []
    for adapter in adapters:
        own_rank = adapter.a.shape[1]
        zeros = {name: np.zeros((own_rank, width), np.float32) for name, width in module.outputs.items()}
        bs.append(to_tensor(module.layout_of_b, zeros | adapter.b))
    a_IR = np.concatenate([adapter.a for adapter in adapters], 1)
    b_OR = np.concatenate(bs, 1)

    padding = (0, 0), (0, rank - a_IR.shape[1])
    a_RI = np.pad(a_IR, padding).T
    b_OR = np.pad(b_OR, padding)
    names = module.tensors
    return [
        Tensor(names.a, a_RI.shape, partial(np.asarray, a_RI)),
        Tensor(names.b, b_OR.shape, partial(np.asarray, b_OR)),
    ]
