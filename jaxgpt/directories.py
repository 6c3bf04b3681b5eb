"""Directories that jaxgpt writes: the names of their files, and how to recognize them.

This module imports only the standard library and `jaxgpt.errors`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from jaxgpt.errors import reported

INDEX = "index.json"  # index of a directory of `jaxgpt data prepare`
PREPARED = "jaxgpt token shards"  # prefix of the field `kind` of the index, in all versions
# Subdirectories of a run that is being created or replaced, see checkpoint/replacement.py.
NEW = ".new"
REPLACED = ".replaced"
# Needed files of a run. A replacement moves CONFIG out first and in last: a directory with CONFIG has a complete run.
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
CHECKPOINTS = "checkpoints"  # directory with a subdirectory for each step
RUN_NEEDED = (CONFIG, TOKENIZER, CHECKPOINTS)
# Files of a tokenizer next to its tokenizer.json.
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATES = "additional_chat_templates"  # directory
TOKENIZER_FILES = (GENERATION_CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, CHAT_TEMPLATE, CHAT_TEMPLATES)
TRACKERS = "trackers"  # directory with a subdirectory for each tracker, of `jaxgpt follow`
PROFILE = "profile"  # directory of the traces of `jaxgpt train --profile`
METRICS = "metrics.jsonl"  # metrics of the steps and evaluations
EVALUATION = "evaluation.json"  # loss of each window in the last evaluation
BASELINES = "baselines.json"  # uniform and n-gram losses of the data
TASKS = "tasks.json"  # results of tasks
SAMPLES = "samples.jsonl"  # answers of each evaluation, with their rewards or divergences
LOSS_FIGURE = "loss.png"  # figure of the losses or rewards
RESULTS = (METRICS, EVALUATION, BASELINES, TASKS, SAMPLES, LOSS_FIGURE)
RUN_FILES = (*RUN_NEEDED, *TOKENIZER_FILES, *RESULTS, TRACKERS, PROFILE)


def output_kind(directory: Path) -> str:
    """Return what a directory holds if its files are not text, such as "run"; "" for other directories.

    Raises:
        UserError: if the directory cannot be read.
    """
    if is_prepared(directory):
        return "directory of token ids"
    if holds_run(directory):
        return "run"
    with reported(f"cannot read {directory}"):
        has_config = any((directory / name).is_file() for name in (CONFIG, "adapter_config.json"))
    if has_config and any(directory.glob("*.safetensors")):
        return "exported model"
    return ""


def is_prepared(directory: Path) -> bool:
    """Return whether a directory has an index of `jaxgpt data prepare`, of any version."""
    head = b""
    with suppress(OSError), (directory / INDEX).open("rb") as file:
        head = file.read(200)  # the kind is the first entry
    return f'"kind": "{PREPARED}'.encode() in head


def holds_run(directory: Path) -> bool:
    """Return whether a directory holds a run, or the draft of a run that is being created or replaced."""
    with reported(f"cannot read {directory}"):
        if (directory / CONFIG).is_file() and (directory / CHECKPOINTS).is_dir():
            return True
        return any((directory / draft / CHECKPOINTS).is_dir() for draft in (NEW, REPLACED))
