"""Model cards: README.md of an exported model or adapter, from the records of its run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxgpt import __version__
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.config import Config
from jaxgpt.convert.card.license import check_license, license_metadata, license_section
from jaxgpt.convert.card.loading import loading_section
from jaxgpt.convert.card.original import Card, original_card, split_card
from jaxgpt.convert.card.results import Metrics, results_section, run_metrics
from jaxgpt.convert.card.settings import settings_section
from jaxgpt.convert.card.tasks import tasks_section
from jaxgpt.convert.engines import Engine
from jaxgpt.model.params import count_parameters

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # name of a repository on the hub


class CardSubject(NamedTuple):
    """An exported model or adapter and its run, which a model card describes.

    Attributes:
        run: directory of the exported run.
        info: content of the checkpoint.json of the exported checkpoint.
        config: settings of the run.
        name: name of the exported directory, or of the model on the hub.
        command: command of the export, as returned by `export_command`.
        base: base model of an adapter, a name on the hub or a directory; empty: unknown.
        is_adapter: whether the directory has only the adapters.
        license: license of the model; empty: the license in the card of the original model, if any.
        engines: programs that support the directory.
    """

    run: Path
    info: Info
    config: Config
    name: str
    command: str
    base: str = ""
    is_adapter: bool = False
    license: str = ""
    engines: Sequence[Engine] = ()


def model_card(subject: CardSubject) -> str:
    """Return the model card of an exported model or adapter, followed by the card that the run was imported with.

    Raises:
        UserError: if the license is not an identifier of the hub.
    """
    check_license(subject.license)
    run = subject.run
    info = subject.info
    config = subject.config
    metrics = run_metrics(run)
    original = split_card(original_card(run, config))
    sections = [
        _front_matter(subject, original),
        f"# {subject.name}\n",
        _model(subject),
        _training(subject, metrics),
        results_section(run, metrics, info, config),
        tasks_section(run, info),
        loading_section(subject.name, subject.engines, subject.is_adapter),
        f"## How it was made\n\nExported by jaxgpt {__version__}:\n\n```sh\n{subject.command}\n```\n",
        settings_section(config),
        _limits(config),
        license_section(subject.license, original),
    ]
    if original.metadata or original.text:
        sections.append(f"## Card of the original model\n\n{original.text}")
    return "\n".join(filter(None, sections))


def export_command(run: str | Path, target: Path, options: Mapping[str, str]) -> str:
    """Return the command of an export for its card, quoted for a shell.

    Cards are public, so `run` and `target` are shortened to their names. `--push` and `--shard-size`, which do not change
    the model, are omitted.

    Args:
        run: exported run.
        target: exported directory.
        options: value of each option, keyed by name; options with the value "" are omitted.
    """
    words = ["jaxgpt", "export", Path(run).name, target.name]
    for name, value in options.items():
        if value:
            words += [f"--{name}", value]
    return shlex.join(words)


def _front_matter(subject: CardSubject, original: Card) -> str:
    """Return the metadata that the hub reads."""
    lines = [
        "---",
        f"library_name: {'peft' if subject.is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags:",
        "- jaxgpt",
    ]
    if REPOSITORY.fullmatch(subject.base):
        lines.append(f"base_model: {subject.base}")
    lines += license_metadata(subject.license, original)
    lines.append("---\n")
    return "\n".join(lines)


def _model(subject: CardSubject) -> str:
    """Describe the architecture and the number of parameters."""
    model = subject.config.model
    what = "A decoder-only language model"
    if subject.is_adapter:
        what = f"LoRA adapters of rank {subject.config.lora.rank} for a decoder-only language model"
    parameters = count_parameters(model)
    return (
        f"{what} of {parameters:,} parameters: {model.n_layer} layers of width {model.n_embd}, {model.n_head} heads, a "
        f"context of {model.block_size:,} tokens, and {model.vocab_size:,} ids.\n"
    )


def _training(subject: CardSubject, metrics: Metrics) -> str:
    """Describe the training data, without their paths, and the initial weights."""
    if not metrics:
        return "The weights were imported. The run has no record of their training.\n"
    config = subject.config
    source = Path(config.data.path).name
    if not source:
        source = "a mixture" if config.data.mix else config.data.dataset
    parts = [f"Trained on `{source}`: {subject.info.tokens:,} tokens in {subject.info.step:,} steps."]
    if config.init_from:
        initial, _ = parse_checkpoint(config.init_from)
        parts.append(f"Training started from `{subject.base or initial.name}`.")
    return "## Training data\n\n" + " ".join(parts) + "\n"


def _limits(config: Config) -> str:
    """State what the model may get wrong."""
    context = config.model.block_size
    return (
        f"## Limits\n\nThe model continues texts of up to {context:,} tokens. It may state falsehoods and repeat the biases "
        f"of its data. The export did not test it for any use.\n"
    )
