"""Read and write adapter_config.json of a PEFT adapter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.convert.options import Options
from jaxgpt.files import read_json

CONFIG = "adapter_config.json"
MERGE = "merge the adapter with PEFT (merge_and_unload), and import the merged model"

# Harmless options do not change the output of an adapter. init_lora_weights may change the base, and is checked separately.
HARMLESS = """
    auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights
    lora_dropout megatron_core peft_version qalora_group_size revision target_modules task_type
""".split()
BARE_TASK = "FEATURE_EXTRACTION"  # task of an adapter of a model without head
# These values of init_lora_weights do not change the weights of the base, and neither does false.
KEEPS_BASE = (True, "gaussian", "eva", "orthogonal")


class Scale(NamedTuple):
    """The rank and alpha of an adapter, which adds `alpha / rank * A B` to a matrix."""

    rank: int
    alpha: float


def read_config(path: Path) -> Scale:
    """Read the rank and alpha of an adapter_config.json; raise `UserError` for unsupported options."""
    values = read_json(path)
    # PEFT writes false or an empty value for each feature that is not used.
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
    return Scale(rank, alpha)


def adapter_config(scale: Scale, modules: Sequence[str], base: str, input_first: bool) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
        scale: rank and alpha of all adapters.
        modules: names of the adapted transformers modules.
        base: name or directory of the base.
        input_first: whether transformers stores the matrices of the base as `[in, out]`, as in GPT-2.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": scale.rank,
        "lora_alpha": scale.alpha,
        "target_modules": sorted(modules),
        "fan_in_fan_out": input_first,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
