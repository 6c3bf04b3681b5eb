"""Write checkpoints of runs, in the background, and of weights alone; `store.py` describes and reads their files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxgpt.atomic import sync_directory
from jaxgpt.checkpoint.index import PARTIAL
from jaxgpt.checkpoint.info import About, Info, replace_info, seal
from jaxgpt.checkpoint.retention import prune
from jaxgpt.checkpoint.store import import_orbax, state_parts
from jaxgpt.config import TrainConfig
from jaxgpt.errors import WriteFailed, one_line
from jaxgpt.parallel.processes import is_leader, is_peer_failure

if TYPE_CHECKING:  # optax: a slow import, deferred to the function that needs it
    from jaxgpt.train.step import TrainState


class Saver:
    """Context manager: write checkpoints in the background, and prune them by `train.keep_*`.

    Args:
        directory: directory of the checkpoints.
        train: settings of the run.
        note: called if an old checkpoint cannot be deleted, in the thread of the caller; not repeated for the same checkpoint.
    """

    def __init__(self, directory: Path, train: TrainConfig, note: Callable[[str], None] = lambda _: None) -> None:
        self.directory = directory
        self.train = train
        self._note = note
        self._noted = ""  # the last note
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[str] | None = None  # the write in progress; its result is the note from `prune`

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown()
        if kind is None:  # otherwise, the exception from the block has precedence
            self.wait()

    def save(self, state: TrainState, info: Info) -> None:
        """Wait for the previous write, then write a state in the background; the caller may then donate the state."""
        ocp = import_orbax()

        self.wait()
        path = self.directory / f"{info.step}{PARTIAL}"
        with failed_writes():
            response = ocp.save_checkpointables_async(path.absolute(), state_parts(state))
        self._writing = self._executor.submit(self._finish, response.result, path, info)

    def save_info(self, info: Info) -> None:
        """Replace the info of the last checkpoint after its evaluation; the digests are kept."""
        self.wait()
        if is_leader():
            path = self.directory / str(info.step)
            replace_info(path, info)

    def check(self) -> None:
        """Raise the error of a failed background write."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises `TrainingFailed` if it cannot be written."""
        writing = self._writing
        self._writing = None  # even if the write has failed
        if writing is None:
            return
        with failed_writes():
            note = writing.result()
        if note not in ("", self._noted):
            self._noted = note
            self._note(note)

    def _finish(self, written: Callable[[], None], path: Path, info: Info) -> str:
        """Wait until all processes have written; then, in process 0, commit the checkpoint, and return the note of `prune`."""
        written()
        if not is_leader():
            return ""
        commit(path, info)
        return prune(self.directory, self.train)


def commit(partial: Path, info: Info) -> None:
    """Seal a complete checkpoint in STEP.partial, and rename it to STEP."""
    seal(partial, info)
    partial.rename(partial.with_suffix(""))
    sync_directory(partial.parent)


@contextmanager
def failed_writes() -> Iterator[None]:
    """Convert exceptions to one-line `TrainingFailed` errors, except peer failures."""
    try:
        yield
    except Exception as e:
        if is_peer_failure(e):
            raise
        code = re.search(r"os_error_code='(\d+)'", str(e))  # TensorStore's format of the error number
        number = int(code[1]) if code else getattr(e, "errno", None)
        reason = os.strerror(number) if number else one_line(e, 200)
        raise WriteFailed(reason, number) from None


def save_params(directory: Path, params: Any, about: About) -> None:
    """Write weights without optimizer state as the checkpoint of step 0, with little additional memory."""
    ocp = import_orbax()

    from jaxgpt.train.step import TrainState

    options = ocp.Context()
    # Compression would copy the weights, to save only 8% of the space.
    options.array.saving.use_compression = False
    options.memory.deepcopy_host_arrays = False  # no copy: the weights do not change during the write
    state = TrainState(jnp.zeros((), jnp.int32), params, None)
    with options, Saver(directory, TrainConfig()) as saver:
        saver.save(state, Info(0, about=about))
