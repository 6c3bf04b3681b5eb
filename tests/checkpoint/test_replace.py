"""A kill or failed write while a run is replaced or a checkpoint is written always leaves a run that can be read."""

from __future__ import annotations

import errno
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from folders import SMALL, run_folder

import jaxgpt
from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.intact import latest_valid
from jaxgpt.checkpoint.new_run import new_run
from jaxgpt.checkpoint.replacement import delete_replaced, recover, replaced_run
from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.saver import Saver
from jaxgpt.config import TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.train.step import TrainState

RUN, NOTES = Path("place/run"), "notes.txt"
WRITES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
_observers: list[Callable[[str, tuple[Any, ...]], None]] = []
sys.addaudithook(lambda event, values: [each(event, values) for each in _observers] and None)  # type: ignore[arg-type]


@contextmanager
def observed(act: Callable[[int, str], None]) -> Iterator[list[str]]:
    """Call a function before each file operation below `RUN.parent`, with the operation's index; yield the operations."""
    seen, lock = list[str](), threading.RLock()

    def observe(event: str, values: tuple[Any, ...]) -> None:
        if event not in WRITES or (event == "open" and (not isinstance(values[1], str) or values[1][0] == "r")):
            return
        with lock:
            if _observers and "place" in Path(str(values[0])).parts:
                _observers.clear()  # the function may use files
                seen.append(event)
                try:
                    act(len(seen), event)
                finally:
                    _observers.append(observe)

    _observers.append(observe)
    try:
        yield seen
    finally:
        _observers.clear()


def weights(run: Path) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jaxgpt.load(run).params))


@pytest.fixture
def new() -> jaxgpt.LM:
    """A model to save over the run in `RUN`."""
    RUN.parent.mkdir()
    run_folder(RUN, SMALL)
    (RUN / NOTES).touch()
    lm = jaxgpt.load(RUN)
    return lm._replace(params=jax.tree.map(lambda w: w + 1, lm.params))


def save(lm: jaxgpt.LM) -> None:
    """Replace a run from Python."""
    jaxgpt.save(lm, RUN, overwrite=True)


def start(lm: jaxgpt.LM) -> None:
    """Replace a run as `jaxgpt train --overwrite` does, up to its first step."""
    with new_run(str(RUN), lm.config, lm.tokenizer, overwrite=True):
        delete_replaced(RUN)


def restart(lm: jaxgpt.LM) -> None:
    """Start a new run over an old one, kill it before its first step, and start a second new run."""
    with new_run(str(RUN), lm.config, lm.tokenizer, overwrite=True):
        pass
    start(lm)


def fail(lm: jaxgpt.LM) -> None:
    """Start a new run over an old one; it fails before its first step."""
    with suppress(UserError), new_run(str(RUN), lm.config, lm.tokenizer, overwrite=True):
        raise UserError("bad data")


@pytest.mark.parametrize(
    "replace", [save, start, pytest.param(restart, marks=pytest.mark.ci), pytest.param(fail, marks=pytest.mark.long)]
)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_run(replace: Callable[[Any], None], new: jaxgpt.LM) -> None:
    """A copy of the directory before an operation equals the directory that a process leaves if it is killed there."""
    old = weights(RUN)

    def copy(number: int, event: str) -> None:
        with suppress(shutil.Error, OSError):  # Orbax's threads write the new run concurrently
            shutil.copytree(RUN, f"killed-{number}")

    with observed(copy) as events:
        replace(new)
    found = {"old": 0, "new": 0, "both": 0, "moved": 0}
    for number in range(1, len(events) + 1):
        run = Path(f"killed-{number}")
        assert (run / NOTES).exists()
        found["moved"] += not Run(run).exists()
        recover(run)
        assert Run(run).exists()
        if (run / "checkpoints" / "0").exists() and weights(run) == old:
            found["old"] += 1
        else:  # a new run has all its settings, and a saved model its weights
            assert Run(run).config() == new.config
            assert replace is not save or weights(run) == weights(RUN)
            kept = replaced_run(run)
            assert kept is None or weights(kept) == old
            found["both" if kept else "new"] += 1
    assert min(found["old"], found["moved"]) > 0, found
    assert (found["new"] > 0) == (replace is not fail), found
    assert (found["both"] > 0) == (replace is not save), found


def test_a_kill_while_an_old_run_is_restored_keeps_it(new: jaxgpt.LM) -> None:
    """Kill `recover` at each of its operations, after a failed move."""
    old = weights(RUN)
    with new_run(str(RUN), new.config, new.tokenizer, overwrite=True):
        pass
    (RUN / "config.json").unlink()

    def copy(number: int, event: str) -> None:
        shutil.copytree(RUN, f"killed-{number}")

    with observed(copy) as events:
        recover(RUN)
    assert len(events) > 5
    for run in (RUN, *(Path(f"killed-{number}") for number in range(1, len(events) + 1))):
        recover(run)
        assert weights(run) == old


@pytest.mark.parametrize("replace", [pytest.param(save, marks=pytest.mark.ci), start, fail])
def test_a_full_disk_at_any_write_keeps_the_old_run(replace: Callable[[Any], None], new: jaxgpt.LM) -> None:
    old, last = weights(RUN), 0

    def fill(number: int, event: str) -> None:
        if number == last and event in ("open", "os.mkdir"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with observed(lambda *_: None) as events:
        replace(new)
    for last in [number for number, event in enumerate(events, 1) if event in ("open", "os.mkdir")]:
        shutil.rmtree(RUN)
        run_folder(RUN, SMALL)
        with observed(fill), suppress(UserError, jaxgpt.errors.TrainingFailed):
            replace(new)
        assert weights(RUN) == old or Run(RUN).config() == new.config, (last, events[last - 1])


def test_a_kill_while_a_checkpoint_is_written_leaves_intact_checkpoints() -> None:
    """The second checkpoint replaces the first, which is deleted."""
    folder, copies = RUN.parent, list[Path]()
    state = TrainState(np.int32(0), {"w": np.ones(8, np.float32)}, None, None)

    def copy(number: int, event: str) -> None:
        copies.append(Path(f"killed-{number}"))
        with suppress(shutil.Error, OSError):  # Orbax's threads write concurrently
            shutil.copytree(folder, copies[-1])

    with Saver(folder, TrainConfig(keep_last=1)) as saver:
        saver.save(state, Info(1))
        saver.wait()
        with observed(copy):
            saver.save(state, Info(2))
            saver.wait()
    found = set()
    for copied in copies:
        assert latest_valid(copied, pytest.fail) is not None
        found.add(tuple(checkpoints(copied)))
        assert sorted(path.name for path in copied.iterdir()) == [str(step) for step in checkpoints(copied)]
    assert found == {(1,), (1, 2), (2,)}
