"""Load tasks of lm-evaluation-harness and their data, by name or from files."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError, one_line
from jaxgpt.hub import reachable
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.suggestions import did_you_mean
from jaxgpt.tasks.definitions import FILES, check_files, check_kind, check_sources
from jaxgpt.tasks.loaded import Tasks
from jaxgpt.tasks.quiet import offline, quiet


class _NeedsNetwork(Exception):
    """The data set of a task is not in the cache, and the hub cannot be reached; the message is the name of the data set."""


def harness_version() -> str:
    """Return the version of lm-evaluation-harness.

    Raises:
        UserError: if the harness is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("tasks need lm-evaluation-harness, which is not installed: pip install 'jaxgpt[eval]'")
    from importlib.metadata import version

    return version("lm_eval")


def open_tasks(
    names: Sequence[str], path: str = "", shots: int | None = None, progress: Progress = NO_PROGRESS
) -> Tasks:
    """Load tasks and their data.

    Data are read from the cache of the package `datasets`, or from the hub if they are not in the cache.

    Args:
        names: tasks, groups or tags of the harness, patterns of names such as `mmlu_*`, or YAML files of tasks.
        path: directory of further YAML files, which have precedence over tasks of the harness; empty: no directory.
        shots: number of examples in each prompt; None: as each task defines. A task that defines 0 keeps 0.
        progress: called with each stage, finding and loading the tasks.

    Raises:
        UserError: if the harness is missing, a name is unknown, the data of a task cannot be read, or a task is defined twice
            or needs more than a text model.
    """
    if not names:
        raise UserError("no task is named: pass names such as hellaswag,arc_easy")
    if path and not Path(path).is_dir():
        raise UserError(f"the directory of tasks {path} does not exist: change --tasks-path")
    harness_version()
    with quiet():
        progress.stage("finding the tasks")
        manager, found = _find(names, path)
        progress.stage("loading the tasks")
        loaded = _load_all(manager, found, progress)

    check_sources({name: [*part["tasks"], *part.get("groups", {})] for name, part in loaded.items()})
    # The harness evaluates a single dict in the format that its task manager returns: merge the dicts of all names.
    merged: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for part in loaded.values():
        for kind in merged:
            merged[kind] |= part.get(kind, {})

    if path:
        check_files(Path(path), list(merged["tasks"]))
    for name, task in merged["tasks"].items():
        check_kind(name, task)
        _set_shots(task, shots)
    return Tasks(tuple(found), merged)


def split_names(text: str) -> tuple[str, ...]:
    """Split names that are separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _find(names: Sequence[str], path: str) -> tuple[Any, list[str]]:
    """Return the harness' task manager, and the names with patterns expanded.

    Indexing the thousands of tasks of the harness takes seconds, so they are indexed only if a name is not local.
    """
    from lm_eval.tasks import TaskManager

    for name in names:
        if name.endswith(FILES) and not Path(name).is_file():
            raise UserError(f"the task file {name} does not exist: correct its path")

    manager = TaskManager(include_path=path or None, include_defaults=False)
    is_local = all(name.endswith(FILES) or manager.match_tasks([name]) for name in names)
    if not is_local:
        manager = TaskManager(include_path=path or None)

    found: list[str] = []
    for name in names:
        matches = [name] if name.endswith(FILES) else manager.match_tasks([name])
        if not matches:
            hint = did_you_mean(name, manager.all_tasks)
            raise UserError(
                f"unknown task {name}{hint}: use a task of lm-evaluation-harness {harness_version()} (lm_eval ls tasks), a "
                f"YAML file, or a directory of such files with --tasks-path"
            )
        found += matches
    return manager, list(dict.fromkeys(found))


def _load_all(manager: Any, names: Sequence[str], progress: Progress) -> dict[str, Mapping[str, Any]]:
    """Load tasks, groups and their data, keyed by name.

    Raises:
        UserError: as in `_load`, or if the hub cannot be reached: then with the names of all tasks that need it.
    """
    loaded: dict[str, Mapping[str, Any]] = {}
    without_data: list[str] = []
    for number, name in enumerate(names):
        progress(number, len(names))
        try:
            loaded[name] = _load(manager, name)
        except _NeedsNetwork as e:
            without_data.append(f"{name} ({e})")
    if without_data:
        raise UserError(
            f"the Hugging Face Hub cannot be reached, and these tasks need data that are not in its cache: "
            f"{', '.join(without_data)}; run the command once with a network, or use local tasks (--tasks-path)"
        )
    return loaded


def _load(manager: Any, name: str) -> Mapping[str, Any]:
    """Load a task or group and its data: from the cache or local files, otherwise from the hub.

    Raises:
        _NeedsNetwork: if the hub is needed, but cannot be reached.
        UserError: if the task is malformed, or its data cannot be read.
    """
    try:
        with offline():
            return manager.load([name])
    except (ConnectionError, FileNotFoundError, TimeoutError) as e:
        if _is_offline() or not reachable():
            raise _no_network(name, e) from None
    except Exception as e:
        raise _unloadable(name, e) from None

    try:
        return manager.load([name])
    except Exception as e:
        raise _unloadable(name, e) from None


def _no_network(name: str, e: Exception) -> Exception:
    """Return the error of a task that cannot be loaded from the cache, without a network.

    `datasets` raises a `ConnectionError` for data that are not in the cache; other errors have a different cause.
    """
    if not isinstance(e, ConnectionError):
        return _unloadable(name, e)
    quoted = re.search(r"(?<!\w)'([^']+)'", str(e))
    return _NeedsNetwork(quoted[1] if quoted else "its data")


def _unloadable(name: str, e: Exception) -> UserError:
    if isinstance(e, KeyError) and e.args == (None,):  # the harness has logged an unknown metric
        return UserError(f"cannot load the task {name}: one of its metrics is unknown: correct its metric_list")
    return UserError(f"cannot load the task {name}: {type(e).__name__}: {one_line(e, 300)}")


def _is_offline() -> bool:
    """Return whether the user has turned on the hub's offline mode."""
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


def _set_shots(task: Any, shots: int | None) -> None:
    """Set the number of examples as the harness does: a task that defines 0 keeps 0; the default is 0."""
    defined = task.get_config("num_fewshot")
    if shots is not None and defined != 0:
        task.set_config(key="num_fewshot", value=shots)
    elif defined is None:
        task.set_config(key="num_fewshot", value=0)
