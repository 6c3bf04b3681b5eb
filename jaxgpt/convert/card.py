"""Model cards: README.md of an exported model or adapter, from the records of its run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt import __version__
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config, flat
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import read_bytes
from jaxgpt.model.params import count_parameters
from jaxgpt.post_settings import shown_reward
from jaxgpt.report.baselines import read_baselines
from jaxgpt.tasks.record import TITLES, evaluation_settings, read_results, table
from jaxgpt.trainer.metrics import read_metrics

Metrics = Sequence[dict[str, Any]]  # lines of a metrics.jsonl

CARD = "README.md"
CARD_BYTES = 1 << 20  # maximum size of a card in bytes
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
LOAD_VLLM = """In vLLM, according to its source code, not run:

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
        run: the run.
        info: content of the checkpoint.json of the exported checkpoint.
        name: name of the exported directory, or of the model on the hub.
        config: settings of the run.
        command: command that exported it.
        base: name of the base model on the hub, if known.
        adapter: whether the directory has only the adapters.
        license: license of the model; empty: of the original model, if its card names one.
        served: programs that support the directory, as from `engines`.

    Raises:
        UserError: if the license is not the name of a license.
    """
    check_license(license)
    original = _split(original_card(run, config))
    metrics = _metrics(run)
    sections = [
        _front_matter(original, base, adapter, license),
        f"# {name}\n",
        _model(config, adapter),
        _training(metrics, info, config, base),
        _results(run, metrics, info, config),
        _tasks(run, info),
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


def original_card(run: Path, config: Config) -> str:
    """Return the card that a run, or a run that it descends from, was imported with, or ""."""
    seen: set[Path] = set()
    while run.resolve() not in seen:
        seen.add(run.resolve())
        card = read_card(run)
        if card or not config.init_from:
            return card
        recorded, _ = parse_checkpoint(config.init_from)
        next_to_run = run.absolute().parent / recorded.name
        run = recorded if recorded.is_dir() else next_to_run
        try:
            config = Run(run).config()
        except (OSError, UserError):  # a missing or damaged run has no further ancestors
            return read_card(run)
    return ""


def read_card(directory: Path) -> str:
    """Return the text of a directory's README.md, or "" without a readable one."""
    with suppress(UserError):
        text = read_bytes(directory / CARD, CARD_BYTES).decode("utf-8-sig", errors="replace")
        return text.replace("\r\n", "\n")
    return ""


def check_license(name: str) -> None:
    """Raise `UserError` if a license is not an identifier of the hub, such as apache-2.0; "": no license."""
    if name and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        raise UserError(
            f"license {short_repr(name)} is not a name of the hub: use one such as apache-2.0, mit or other"
        )


class Card(NamedTuple):
    """A model card.

    Attributes:
        metadata: its front matter, without the lines `---`; "": none.
        text: the remainder.
    """

    metadata: str
    text: str


def _split(card: str) -> Card:
    """Split a card into its front matter and its text."""
    found = re.match(r"---\n(.*?)\n---\s*(?:\n|$)", card, re.DOTALL)
    if found is None:
        return Card("", card)
    return Card(found[1] + "\n", card[found.end() :])


def _front_matter(original: Card, base: str, adapter: bool, license: str) -> str:
    """Return the metadata that the hub reads; without a license, it is the original model's, if its card names one."""
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


def _results(run: Path, metrics: Metrics, info: Info, config: Config) -> str:
    """Return the loss of the exported checkpoint and the baselines of the same data, or "" without an evaluation."""
    if config.post.objective != "next-token":
        return _post_results(metrics, info, config)
    evaluated = [line for line in metrics if "val_loss" in line and line["step"] == info.step]
    if not evaluated:
        return ""

    found = evaluated[-1]
    error = f" +- {found['val_stderr']:.4f}" if "val_stderr" in found else ""
    text = "held-out text"
    if not _held_out(info, config):
        text = "the training text, because the run held out no text"
    lines = [
        "## Results\n",
        "| model | loss, nats per token |",
        "|---|---|",
        f"| this model, step {info.step:,} | {found['val_loss']:.4f}{error} |",
        *[f"| {name} baseline | {loss:.4f} |" for name, loss in _baselines(run, found.get("val_data")).items()],
        f"\nThe loss is on {text}; +- is the standard error over its windows.\n",
    ]
    return "\n".join(lines)


def _baselines(run: Path, data: Any) -> dict[str, float]:
    """Return the losses of the baselines of a run, keyed by name; {}: the run has none of the same data."""
    try:
        known = read_baselines(run)
    except UserError:
        return {}
    losses: dict[str, float] = known["losses"]
    return losses if known.get("data", data) == data else {}


def _tasks(run: Path, info: Info) -> str:
    """Return the results of `jaxgpt eval RUN --tasks` for the exported checkpoint, or "" without any."""
    results = read_results(run, info.step)
    if not results:
        return ""
    rows = ["## Tasks\n", f"| {' | '.join((*TITLES, 'settings'))} |", "|" + "---|" * (len(TITLES) + 1)]
    _, *cells = table([result for result, _ in results])
    for row, (_, facts) in zip(cells, results, strict=True):
        rows.append(f"| {' | '.join([*row, evaluation_settings(facts)])} |")
    versions = {facts.get("versions", {}).get("lm_eval", "unknown") for _, facts in results}
    rows.append(
        f"\nMeasured by lm-evaluation-harness {', '.join(sorted(versions))}; +- is the standard error over the samples.\n"
    )
    return "\n".join(rows)


def _post_results(metrics: Metrics, info: Info, config: Config) -> str:
    """Return the results of the exported checkpoint of a run on preference pairs or with rewards, or ""."""
    name = "val_reward" if config.post.has_rewards else "val_loss"
    evaluated = [line for line in metrics if name in line and line["step"] == info.step]
    if not evaluated:
        return ""
    found = evaluated[-1]
    split = "held-out" if _held_out(info, config) else "training"
    if config.post.has_rewards:
        reward = " ".join(map(shown_reward, config.post.reward))
        text = f"The mean reward ({reward}) of the answers to {split} prompts is {found['val_reward']:.4f}."
    elif config.post.is_rollout:
        text = f"On its answers to {split} prompts, the divergence from the teacher is {found['val_loss']:.4f} nats per token."
    elif config.post.is_distillation:
        loss = found["val_cross_entropy"]
        text = f"On {split} text, the divergence from the teacher is {found['val_loss']:.4f}, and the loss {loss:.4f} nats."
    else:
        text = f"The {config.post.objective} loss on {split} pairs is {found['val_loss']:.4f}."
        if "val_accuracy" in found:
            text += f" The reward of the chosen answer is higher in {found['val_accuracy']:.1%} of the pairs."
    return f"## Results\n\nTrained with {config.post.objective}. {text}\n"


def _held_out(info: Info, config: Config) -> bool:
    """Return whether the evaluations of a run used other text than its training text."""
    has_validation_files = any(boundary is not None for boundary in info.about.get("boundaries", {}).values())
    # Earlier checkpoints do not record whether text was held out.
    return bool(info.about.get("held_out", has_validation_files or config.data.train_fraction < 1))


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


def _metrics(run: Path) -> Metrics:
    """Return the lines of a run's metrics.jsonl; empty: the run has no such file."""
    path = Run(run).metrics
    if not path.is_file():
        return []
    return list(read_metrics(path))
