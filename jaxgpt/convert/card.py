"""Model cards: README.md of an exported model or adapter, from the records of its run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jaxgpt import __version__
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.config import Config, flat
from jaxgpt.convert.card_results import Metrics, results_section, run_metrics, tasks_section
from jaxgpt.convert.original_card import Card, original_card, split_card
from jaxgpt.errors import UserError, short_repr
from jaxgpt.model.params import count_parameters

# Settings with paths, which stay private.
PATHS = ("data.path", "data.mix", "data.tokenizer", "init_from", "state_from", "post.reference", "post.reward")
# The license in a card's metadata: a name, or a list of names on the next lines.
LICENSE = re.compile(r"^license(?:_name|_link)?:(?: *\S[^\n]*|(?:\n *- *\S[^\n]*)+)$", re.MULTILINE)
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

LOAD_MODEL = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

```sh
jaxgpt import {name} runs/{run}
jaxgpt sample runs/{run} --prompt "..."
```
"""
LOAD_VLLM = """In vLLM (according to its source code; not tested):

```sh
vllm serve {name}
```
"""
LOAD_LLAMACPP = """In llama.cpp, as a GGUF file:

```sh
jaxgpt import {name} runs/{run}
jaxgpt export runs/{run} {run}.gguf --type q8_0
llama-cli -m {run}.gguf
```
"""
LOAD_ADAPTER = """```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
```

```sh
jaxgpt import {name} runs/{run} --init-from runs/base
```
"""


def model_card(
    run: Path,
    info: Info,
    name: str,
    config: Config,
    command: str,
    base: str = "",
    adapter: bool = False,
    license: str = "",
    served: Sequence[str] = (),
) -> str:
    """Return the model card of an exported model or adapter, followed by the card that the run was imported with.

    Args:
        run: directory of the exported run.
        info: content of the checkpoint.json of the exported checkpoint.
        name: name of the exported directory, or of the model on the hub.
        config: settings of the run.
        command: command that exported it.
        base: name of the base model on the hub, if known.
        adapter: whether the directory has only the adapters.
        license: license of the model; empty: the license in the card of the original model, if any.
        served: programs that support the directory (`engines`).

    Raises:
        UserError: if `license` is not an identifier of the hub.
    """
    check_license(license)
    original = split_card(original_card(run, config))
    metrics = run_metrics(run)
    sections = [
        _front_matter(original, base, adapter, license),
        f"# {name}\n",
        _model(config, adapter),
        _training(metrics, info, config, base),
        results_section(run, metrics, info, config),
        tasks_section(run, info),
        "## How to load it\n",
        (LOAD_ADAPTER if adapter else LOAD_MODEL).format(name=name, run=name.rpartition("/")[2]),
        _serving(name, served),
        f"## How it was made\n\nExported by jaxgpt {__version__}:\n\n```sh\n{command}\n```\n",
        _settings(config),
        _limits(config),
        _license(original, license),
    ]
    if original.metadata or original.text:
        sections.append(f"## Card of the original model\n\n{original.text}")
    return "\n".join(filter(None, sections))


def check_license(name: str) -> None:
    """Raise `UserError` if a license is not an identifier of the hub, such as apache-2.0; "": no license."""
    if name and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        raise UserError(
            f"license {short_repr(name)} is not a name of the hub: use, for example, apache-2.0, mit or other"
        )


def _front_matter(original: Card, base: str, adapter: bool, license: str) -> str:
    """Return the metadata that the hub reads, with `license` or, if it is empty, the license in the original card."""
    lines = [
        "---",
        f"library_name: {'peft' if adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags:",
        "- jaxgpt",
    ]
    if REPOSITORY.fullmatch(base):
        lines.append(f"base_model: {base}")
    lines += [f"license: {license}"] if license else LICENSE.findall(original.metadata)
    lines.append("---\n")
    return "\n".join(lines)


def _model(config: Config, adapter: bool) -> str:
    model = config.model
    what = "A decoder-only language model"
    if adapter:
        what = f"LoRA adapters of rank {config.lora.rank} for a decoder-only language model"
    parameters = count_parameters(model)
    return (
        f"{what} of {parameters:,} parameters: {model.n_layer} layers of width {model.n_embd}, {model.n_head} heads, a "
        f"context of {model.block_size:,} tokens, and {model.vocab_size:,} ids.\n"
    )


def _training(metrics: Metrics, info: Info, config: Config, base: str) -> str:
    if not metrics:
        return "The weights were imported. The run has no record of their training.\n"
    source = Path(config.data.path).name or ("a mixture" if config.data.mix else config.data.dataset)
    parts = [f"Trained on `{source}`: {info.tokens:,} tokens in {info.step:,} steps."]
    if config.init_from:
        initial, _ = parse_checkpoint(config.init_from)
        parts.append(f"Training started from `{base or initial.name}`.")
    return "## Training data\n\n" + " ".join(parts) + "\n"


def _settings(config: Config) -> str:
    defaults = flat(Config())
    changed = {name: value for name, value in flat(config).items() if value != defaults[name] and name not in PATHS}
    rows = [f"- `{name}`: {value}" for name, value in sorted(changed.items())]
    return "\n".join(["Settings that differ from the defaults:\n", *rows]) + "\n" if rows else ""


def _serving(name: str, served: Sequence[str]) -> str:
    """Return how to load a model in other programs that support it."""
    parts = []
    if "vLLM" in served:
        parts.append(LOAD_VLLM)
    if "llama.cpp" in served:
        parts.append(LOAD_LLAMACPP)
    return "\n".join(parts).format(name=name, run=name.rpartition("/")[2])


def _limits(config: Config) -> str:
    context = config.model.block_size
    return (
        f"## Limits\n\nThe model continues texts of up to {context:,} tokens. It may state falsehoods and repeat the biases "
        f"of its data. The export did not test it for any use.\n"
    )


def _license(original: Card, license: str) -> str:
    if license:
        return f"## License\n\n{license}, as chosen for this export.\n"
    if LICENSE.search(original.metadata):
        return "## License\n\nThe license is in the metadata above. It was copied from the original model.\n"
    return "## License\n\nUnknown: the run does not record a license.\n"
