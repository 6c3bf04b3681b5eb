"""Checks of task definitions: each task is defined once, and needs only a text model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError

FILES = (".yaml", ".yml")  # endings of files of tasks


def check_kind(name: str, task: Any) -> None:
    """Raise `UserError` for a task that needs images or audio, or runs generated programs.

    The harness marks such tasks with the attributes `MULTIMODAL` and `UNSAFE_CODE`.
    """
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"{name} runs the programs that a model writes, which jaxgpt does not do: choose a different task"
        )
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{name} has images or audio, and the model reads text: choose a different task")


def check_sources(tasks_of: Mapping[str, Sequence[str]]) -> None:
    """Raise `UserError` if a file and another source define the same task or group.

    A task may come from several names without files, such as a group and its member.

    Args:
        tasks_of: names of the tasks and groups from each source: a file, or a name in the index of the harness.
    """
    first_source: dict[str, str] = {}
    for source, tasks in tasks_of.items():
        for task in tasks:
            first = first_source.setdefault(task, source)
            if first != source and (first.endswith(FILES) or source.endswith(FILES)):
                raise UserError(
                    f"the task {task} is defined twice, in {first} and {source}: rename one, or evaluate one at a time"
                )


def check_files(directory: Path, tasks: Sequence[str]) -> None:
    """Raise `UserError` if several files of a directory define one of the tasks; the harness would use only one of them."""
    first_file: dict[str, Path] = {}
    for file in sorted(directory.glob("**/*.yaml")):
        task = defined_task(file)
        if task not in tasks:
            continue
        first = first_file.setdefault(task, file)
        if first != file:
            raise UserError(f"the task {task} is defined twice, in {first} and {file}: rename one")


def defined_task(file: Path) -> str:
    """Return the name of the task that a YAML file defines; "": no task, as in the file of a group, or an invalid file."""
    import yaml

    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        # Compose nodes, not values: the tag !function of the harness would import a program.
        document = yaml.compose(file.read_text("utf-8", "replace"), Loader=loader)
    except yaml.YAMLError:
        return ""
    if not isinstance(document, yaml.MappingNode):
        return ""
    for key, value in document.value:
        if key.value == "task" and isinstance(value, yaml.ScalarNode):
            return str(value.value)
    return ""
