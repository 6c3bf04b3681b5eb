"""The words of `lora.targets`: names of matrices, transformers modules, and all-linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxgpt.config import LoraConfig, ModelConfig
from jaxgpt.convert.peft.target_modules import modules_if_any
from jaxgpt.errors import UserError, short_repr
from jaxgpt.model.lora import abstract_trained, matrices
from jaxgpt.model.params import abstract_params
from jaxgpt.suggestions import did_you_mean


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
    abstract_trained(model, replace(lora, targets=joined))  # raises the errors of init_lora for these targets
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
