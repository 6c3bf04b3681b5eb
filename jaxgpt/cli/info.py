"""jaxgpt info RUN|PRESET"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.output import print_facts, print_json
from jaxgpt.cli.parse import Json
from jaxgpt.cli.progress import duration
from jaxgpt.cli.settings import named_config, with_vocab
from jaxgpt.config import Config, changes
from jaxgpt.errors import short_repr
from jaxgpt.presets import PRESETS, preset

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.data import Tokenizer


OF_DATA = ("model.vocab_size", "init_from")  # set by the data and by --init-from


def info(target: str, /, *, json: Json = False) -> int:
    """Print the state of a run or the settings of a preset, the parameters of each module, FLOPs per token, and bytes.

    A run has its step, checkpoints with their losses, data, time, and the settings that differ from its preset.

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

        run = open_run(Path(target))
        results["run"] = state_of(run, config)
        results["special_tokens"] = special_tokens(run.tokenizer())
    if json:
        print_json({"name": target} | results)
        return 0
    print(f"{target}: {results['parameters']:,} parameters")
    if lora.rank:
        print(f"adapters: LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {lora.targets}")
        print(f"          {results['trainable_parameters']:,} trainable parameters; base: {config.init_from}")
    if "run" in results:
        _print_state(results["run"])
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


def state_of(run: Run, config: Config) -> dict[str, Any]:
    """Return what is known of a run: its step, checkpoints, data, time, and the settings that differ from its preset."""
    from jaxgpt.checkpoint.store import checkpoints, resolve_step
    from jaxgpt.trainer.metrics import read_metrics

    infos = checkpoints(run.checkpoints)
    lines = list(read_metrics(run.metrics)) if run.metrics.is_file() else []
    steps = [line for line in lines if "loss" in line]
    differ = changes(preset(config.preset) if config.preset in PRESETS else config, config)
    sealed = {
        int(path.parent.name) for path in run.checkpoints.glob("*/checkpoint.json") if path.parent.name.isdecimal()
    }
    newest = infos[max(infos)] if infos else None
    return {
        "preset": config.preset,
        "init_from": config.init_from,
        "data": config.data.path or " ".join(config.data.mix) or config.data.dataset,
        "step": max([line["step"] + 1 for line in steps] + list(infos), default=0),
        "steps": config.train.steps if steps else 0,
        "tokens": newest.tokens if newest else 0,
        "seconds": max((line.get("elapsed_seconds", 0.0) for line in steps), default=0.0),
        "checkpoints": [{"step": step, "val_loss": each.val_loss} for step, each in infos.items()],
        "best": resolve_step(run.checkpoints, "best") if infos else None,
        "damaged": sorted(sealed - set(infos)),
        "changed": {name: value for name, (_, value) in differ.items() if name not in OF_DATA},
        "starts": [line for line in lines if "started" in line],
    }


def _print_state(run: dict[str, Any]) -> None:
    steps = [
        f"step {each['step']}"
        + ("" if each["val_loss"] is None else f": loss {each['val_loss']:.4f}")
        + (" (best)" if each["step"] == run["best"] else "")
        for each in run["checkpoints"]
    ]
    trained = f"step {run['step']}/{run['steps']}, {run['tokens']:,} tokens in {duration(run['seconds'])}"
    print_facts(
        {
            "preset": run["preset"],
            "settings": [f"{name} {short_repr(value)}" for name, value in run["changed"].items()],
            "weights": f"started from {run['init_from']}" if run["init_from"] else "",
            "data": run["data"],
            "trained": trained if run["steps"] else "no: imported or saved from Python",
            "checkpoints": steps + [f"step {step}: damaged checkpoint.json" for step in run["damaged"]] or "none yet",
            "started": [_start(line) for line in run["starts"]],
        }
    )


def _start(line: dict[str, Any]) -> str:
    """Format the start of a run: its command, and where and when it was given."""
    versions = ", ".join(f"{name} {version}" for name, version in line.get("versions", {}).items() if name != "code")
    code = f"commit {line['commit']}" if line.get("commit") else ""
    where = " on ".join(filter(None, (line["started"], line.get("host", ""))))
    return "; ".join(filter(None, (f"step {line['step']}: {line.get('command', '')}", where, versions, code)))


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
    return {
        "parameters": parameter_count(params),
        "trainable_parameters": parameter_count(abstract_trained(config.model, config.lora)),
        "modules": parameter_table(params),
        "flops_per_token": flops_per_token(config.model, params, config.window, config.lora),
        "bytes": state_bytes(config, params),
    }


def flops_formula(config: Config) -> str:
    """Return the formula of the training FLOPs per token, as `jaxgpt.trainer.metrics.flops_per_token` computes them."""
    return f"{'4 P + 2 A' if config.lora.rank else '6 P'} + 12 L N H T"


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
