"""Model cards: README.md of an exported model or adapter, from the records of its run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxgpt import __version__
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.config import Config, flat, private_settings
from jaxgpt.convert.card_results import Metrics, results_section, run_metrics, tasks_section
from jaxgpt.convert.original_card import Card, original_card, split_card
from jaxgpt.errors import UserError, short_repr
from jaxgpt.model.params import count_parameters

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


class Export(NamedTuple):
    """An exported model or adapter and its run, which a model card describes.

    Attributes:
        run: directory of the exported run.
        info: content of the checkpoint.json of the exported checkpoint.
        config: settings of the run.
        name: name of the exported directory, or of the model on the hub.
        command: command that exported it.
        base: name of the base model on the hub, if known.
        is_adapter: whether the directory has only the adapters.
        license: license of the model; empty: the license in the card of the original model, if any.
        served: programs that support the directory (`engines`).
    """

    run: Path
    info: Info
    config: Config
    name: str
    command: str
    base: str = ""
    is_adapter: bool = False
    license: str = ""
    served: Sequence[str] = ()


def model_card(export: Export) -> str:
    """Return the model card of an exported model or adapter, followed by the card that the run was imported with.

    Raises:
        UserError: if the license is not an identifier of the hub.
    """
    check_license(export.license)
    run = export.run
    info = export.info
    config = export.config
    metrics = run_metrics(run)
    original = split_card(original_card(run, config))
    sections = [
        _front_matter(export, original),
        f"# {export.name}\n",
        _model(export),
        _training(export, metrics),
        results_section(run, metrics, info, config),
        tasks_section(run, info),
        _loading(export),
        f"## How it was made\n\nExported by jaxgpt {__version__}:\n\n```sh\n{export.command}\n```\n",
        _settings(config),
        _limits(config),
        _license(export, original),
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


def _front_matter(export: Export, original: Card) -> str:
    """Return the metadata that the hub reads; without a license of the export, with the license of the original card."""
    lines = [
        "---",
        f"library_name: {'peft' if export.is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags:",
        "- jaxgpt",
    ]
    if REPOSITORY.fullmatch(export.base):
        lines.append(f"base_model: {export.base}")
    if export.license:
        lines.append(f"license: {export.license}")
    else:
        lines += LICENSE.findall(original.metadata)
    lines.append("---\n")
    return "\n".join(lines)


def _model(export: Export) -> str:
    """Describe the architecture and the number of parameters."""
    model = export.config.model
    what = "A decoder-only language model"
    if export.is_adapter:
        what = f"LoRA adapters of rank {export.config.lora.rank} for a decoder-only language model"
    parameters = count_parameters(model)
    return (
        f"{what} of {parameters:,} parameters: {model.n_layer} layers of width {model.n_embd}, {model.n_head} heads, a "
        f"context of {model.block_size:,} tokens, and {model.vocab_size:,} ids.\n"
    )


def _training(export: Export, metrics: Metrics) -> str:
    """Describe the training data, without their paths, and the initial weights."""
    if not metrics:
        return "The weights were imported. The run has no record of their training.\n"
    config = export.config
    source = Path(config.data.path).name or ("a mixture" if config.data.mix else config.data.dataset)
    parts = [f"Trained on `{source}`: {export.info.tokens:,} tokens in {export.info.step:,} steps."]
    if config.init_from:
        initial, _ = parse_checkpoint(config.init_from)
        parts.append(f"Training started from `{export.base or initial.name}`.")
    return "## Training data\n\n" + " ".join(parts) + "\n"


def _loading(export: Export) -> str:
    """Show how to load the model with transformers and jaxgpt, and in other programs that support it."""
    parts = ["## How to load it\n", LOAD_ADAPTER if export.is_adapter else LOAD_MODEL]
    if "vLLM" in export.served:
        parts.append(LOAD_VLLM)
    if "llama.cpp" in export.served:
        parts.append(LOAD_LLAMACPP)
    _, _, without_owner = export.name.rpartition("/")
    return "\n".join(parts).format(name=export.name, run=without_owner)


def _settings(config: Config) -> str:
    """List the settings that differ from the defaults, without private settings."""
    private = private_settings()
    defaults = flat(Config())
    rows = []
    for name, value in sorted(flat(config).items()):
        if value != defaults[name] and name not in private:
            rows.append(f"- `{name}`: {value}")
    if not rows:
        return ""
    return "\n".join(["Settings that differ from the defaults:\n", *rows, ""])


def _limits(config: Config) -> str:
    """State what the model may get wrong."""
    context = config.model.block_size
    return (
        f"## Limits\n\nThe model continues texts of up to {context:,} tokens. It may state falsehoods and repeat the biases "
        f"of its data. The export did not test it for any use.\n"
    )


def _license(export: Export, original: Card) -> str:
    """Describe the license and its source."""
    if export.license:
        return f"## License\n\n{export.license}, as chosen for this export.\n"
    if LICENSE.search(original.metadata):
        return "## License\n\nThe license is in the metadata above. It was copied from the original model.\n"
    return "## License\n\nUnknown: the run does not record a license.\n"
