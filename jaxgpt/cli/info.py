"""jaxgpt info RUN|PRESET"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.output import print_json
from jaxgpt.cli.parse import Json
from jaxgpt.cli.settings import named_config
from jaxgpt.config import Config
from jaxgpt.presets import PRESETS

if TYPE_CHECKING:
    from jaxgpt.data import Tokenizer


def info(target: str, /, *, json: Json = False) -> int:
    """Print the number of parameters of each module, FLOPs per token, and bytes of parameters, gradients and optimizer state.

    jaxgpt info gpt2
    jaxgpt info runs/shakespeare
    jaxgpt info gpt2 --json

    Args:
        target: preset or run
    """
    config = with_vocab(named_config(target))
    results, lora = describe(config), config.lora
    if target not in PRESETS:
        from jaxgpt.checkpoint.run import open_run

        results["special_tokens"] = special_tokens(open_run(Path(target)).tokenizer())
    if json:
        print_json({"name": target} | results)
        return 0
    print(f"{target}: {results['parameters']:,} parameters")
    if lora.rank:
        print(f"adapters: LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {lora.targets}")
        print(f"          {results['trainable_parameters']:,} trainable parameters; base: {config.init_from}")
    print()
    for module, count in _merged(results["modules"]):
        print(f"  {'  ' * module.count('/')}{module.split('/')[-1]:<{28 - 2 * module.count('/')}}{count:>15,}")
    meaning = "P: parameters in matrix products" + ", A: in adapted ones" * bool(lora.rank)
    print(f"\ntraining FLOPs per token  {results['flops_per_token']:,}  ({flops_formula(config)}; {meaning})")
    for kind, count in results["bytes"].items():
        print(f"{kind:<26}{count:>15,} bytes")
    special = results.get("special_tokens", {})
    for label, name in (("texts begin with", "begin"), ("texts end with", "end")):
        if special.get(name):
            tokens = [f"{token['text']} ({token['id']})" for token in special[name]]
            print(f"{label:<26}{', '.join(tokens)}")
    if special.get("chat_template"):
        print(f"{'chat template':<26}yes")
    return 0


def special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokens that are put before a text and that end one, and whether there is a chat template."""

    def listed(ids: tuple[int, ...]) -> list[dict[str, Any]]:
        return [{"id": i, "text": tokenizer.decode([i])} for i in ids]

    return {
        "begin": listed(tokenizer.bos_ids),
        "end": listed(tokenizer.end_ids),
        "chat_template": tokenizer.special.chat_template is not None,
    }


def describe(config: Config) -> dict[str, Any]:
    """Compute parameter counts, FLOPs and bytes from shapes. The vocabulary size must be set; no arrays are allocated."""
    from jaxgpt.model.lora import abstract_trained
    from jaxgpt.model.params import abstract_params
    from jaxgpt.trainer.metrics import flops_per_token, parameter_count, parameter_table, state_bytes

    params = abstract_params(config.model)
    trained = abstract_trained(config.model, config.lora)
    return {
        "parameters": parameter_count(params),
        "trainable_parameters": parameter_count(trained),
        "modules": parameter_table(params),
        "flops_per_token": flops_per_token(config.model, params, config.window, config.lora),
        "bytes": state_bytes(config, params),
    }


def flops_formula(config: Config) -> str:
    """Return the formula of the training FLOPs per token, as `jaxgpt.trainer.metrics.flops_per_token` computes them."""
    return f"{'4 P + 2 A' if config.lora.rank else '6 P'} + 12 L N H T"


def with_vocab(config: Config) -> Config:
    """Set the vocabulary size of a config from its data."""
    from jaxgpt.data import vocab_size

    return config.with_model(vocab_size=vocab_size(config))


def _merged(modules: dict[str, int]) -> list[tuple[str, int]]:
    """Merge the rows of all blocks, which are identical, into one."""
    layers = [name for name in modules if re.fullmatch(r"h_\d+", name)]
    rows = []
    for name, count in modules.items():
        if name == "h_0":
            rows.append((f"h_0 .. h_{len(layers) - 1}, each", count))
        elif name.startswith("h_0/") or not re.match(r"h_\d+(/|$)", name):
            rows.append((name, count))
        if name == "h_0/attn/v_proj":
            packed = sum(modules[f"h_0/attn/{q}_proj"] for q in "qkv")
            rows.append(("h_0/attn/(q, k, v: c_attn)", packed))  # GPT-2 stores the three in one matrix
    return rows
