"""Checks of the definitions of tasks: each task is defined once, and is one that a model of text can do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError

FILES = (".yaml", ".yml")  # endings of files of tasks


def check_task(name: str, task: Any) -> None:
    """Raise `UserError` for tasks that a model of text cannot do, or that run generated programs."""
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"{name} runs the programs that a model writes, which jaxgpt does not do: choose a different task"
        )
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{name} has images or audio, and the model reads text: choose a different task")


def check_one_source(name: str, loaded: Mapping[str, Any], sources: dict[str, str]) -> None:
    """Add the tasks of a name or file to `sources`; raise `UserError` if a file and another source define the same task."""
    for task in [*loaded["tasks"], *loaded.get("groups", {})]:
        other = sources.setdefault(task, name)
        if other != name and (name.endswith(FILES) or other.endswith(FILES)):
            raise UserError(
                f"the task {task} is defined twice, in {other} and {name}: rename one, or evaluate one at a time"
            )


def check_one_file(files: Sequence[Path], task: str) -> None:
    """Raise `UserError` if several files define the same task."""
    if len(files) > 1:
        raise UserError(f"the task {task} is defined twice, in {files[0]} and {files[1]}: rename one")


def files_of_tasks(directory: Path) -> dict[str, list[Path]]:
    """Return the files of a directory that define each task; the harness silently uses only one of them."""
    files: dict[str, list[Path]] = {}
    for file in sorted(directory.glob("**/*.yaml")):
        for name in re.findall(
            r"""^task: *["']?([\w.-]+)["']? *(?:#.*)?$""", file.read_text("utf-8", "replace"), re.MULTILINE
        ):
            files.setdefault(name, []).append(file)
    return files
