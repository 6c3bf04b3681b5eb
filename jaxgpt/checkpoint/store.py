"""Checkpoints of a run: write in the background, commit, list, verify and restore.

checkpoints/300/params/         weights or adapters; Orbax stores each part separately, so that sampling reads a single part
                opt_state/      state of the optimizer
                skip/           statistics for skipping updates, if enabled
                ema/            EMA of params, if enabled
                checkpoint.json `Info`, with the SHA-256 of every file
checkpoints/310.partial*/       checkpoint being written or deleted; a complete checkpoint is renamed to its step
checkpoints/290.damaged/        damaged checkpoints, renamed by a resume, which also deletes partial checkpoints
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from jaxgpt.checkpoint.paths import check_backslash, parse_checkpoint
from jaxgpt.checkpoint.run import open_run, replaced_note
from jaxgpt.config import Config, TrainConfig, from_json
from jaxgpt.errors import UserError, WriteFailed, one_line, reported
from jaxgpt.files import read_bytes, sha256_file, sync_directory, write_atomically
from jaxgpt.parallel.processes import is_leader, is_peer_failure
from jaxgpt.strict_json import parse_json

if TYPE_CHECKING:  # Orbax and optax: slow imports, deferred to the functions that need them
    from jaxgpt.train.step import TrainState

SEAL = "checkpoint.json"
PARTIAL = ".partial"
PARTS = ("params", "opt_state", "skip", "ema")
IN_FLIGHT = 2**26  # bytes that may be read or written at a time, in addition to the largest array


def import_orbax() -> Any:
    """Import Orbax, which is slow, and hide its logs of errors that it also raises."""
    from orbax.checkpoint import v1

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    return v1


@dataclass(frozen=True)
class Info:
    """Content of checkpoint.json."""

    step: int  # number of steps taken
    val_loss: float | None = None  # loss over the windows shared by all evaluations of the run; None: not evaluated
    tokens: int = 0  # number of tokens in the windows of all training steps so far
    temporary: bool = False  # whether written by a timer or when training stops; deleted after the next checkpoint
    about: Mapping[str, Any] = field(default_factory=dict)  # config, versions, digests, given parts, best loss
    sha256: Mapping[str, str] = field(default_factory=dict)  # file digests, keyed by path, including checkpoint.json

    @property
    def ranking(self) -> str | None:
        """Name of the evaluator given in Python that ranked the checkpoint; "": from the settings; None: not recorded."""
        given = self.about.get("given")
        return None if given is None else given.get("evaluators", "")

    def config(self) -> Config:
        """Return the settings of the run when the checkpoint was written."""
        return from_json(json.dumps(self.about.get("config")), f"the config in {SEAL}")


class Saver:
    """Context manager: write checkpoints in the background, and prune them by `train.keep_*`."""

    def __init__(self, directory: Path, train: TrainConfig) -> None:
        self.directory = directory
        self.train = train
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:  # precedence of an error in the block
            self.wait()

    def save(self, state: TrainState, info: Info) -> None:
        """Wait for the previous write, then write a state in the background; the caller may donate it."""
        ocp = import_orbax()

        self.wait()
        path = self.directory / f"{info.step}{PARTIAL}"
        with failed_writes():
            response = ocp.save_checkpointables_async(path.absolute(), _parts(state))
        self._writing = self._thread.submit(self._finish, response.result, path, info)

    def save_info(self, info: Info) -> None:
        """Replace the info of the last checkpoint after its evaluation; the digests are kept."""
        self.wait()
        if is_leader():
            path = self.directory / str(info.step)
            digests = read_info(path).sha256
            write_atomically(path / SEAL, _render(replace(info, sha256=digests)))

    def check(self) -> None:
        """Raise the error of a failed background write."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises `TrainingFailed` if it cannot be written."""
        writing = self._writing
        self._writing = None  # even if the write has failed
        if writing is not None:
            with failed_writes():
                writing.result()

    def _finish(self, written: Callable[[], None], path: Path, info: Info) -> None:
        """Wait until all processes have written; then, in process 0, commit the checkpoint and prune."""
        written()
        if is_leader():
            seal(path, info)
            path.rename(path.with_suffix(""))
            sync_directory(self.directory)
            prune(self.directory, self.train)


def prune(directory: Path, train: TrainConfig) -> None:
    """Delete the checkpoints that `kept` omits, except those with a damaged checkpoint.json."""
    infos = checkpoints(directory)
    for step in infos.keys() - kept(infos, train):
        path = directory / str(step)
        unwanted = path.rename(path.with_suffix(PARTIAL))
        shutil.rmtree(unwanted, ignore_errors=True)


@contextmanager
def failed_writes() -> Iterator[None]:
    """Convert exceptions to one-line `TrainingFailed` errors, except peer failures."""
    try:
        yield
    except Exception as e:
        if is_peer_failure(e):
            raise
        code = re.search(r"os_error_code='(\d+)'", str(e))  # TensorStore's notation
        number = int(code[1]) if code else getattr(e, "errno", None)
        reason = os.strerror(number) if number else one_line(e, 200)
        raise WriteFailed(reason, number) from None


def kept(infos: Mapping[int, Info], train: TrainConfig) -> set[int]:
    """Return the steps to keep: the newest step, even if temporary, and steps selected by `train.keep_*`.

    The best checkpoints are selected separately for each validation data and first evaluator.
    """
    lasting = sorted(step for step, info in infos.items() if not info.temporary)

    losses: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for step in lasting:
        info = infos[step]
        if info.val_loss is not None:
            losses[_ranked_on(infos, step)].append((info.val_loss, step))
    best = [step for each in losses.values() for _, step in sorted(each)[: train.keep_best]]
    every = [step for step in lasting if train.keep_every and step % train.keep_every == 0]
    return {max(infos), *lasting[-train.keep_last :], *best, *every}


def _ranked_on(infos: Mapping[int, Info], step: int) -> tuple[str, str]:
    """Return what a ranking depends on, the validation data and the evaluator: only equal ones are compared.

    Older versions did not record the evaluator: it is assumed to be the evaluator of the last checkpoint.
    """
    info = infos[step]
    ranking = info.ranking
    if ranking is None:
        ranking = infos[max(infos)].ranking
    return info.about.get("data", ""), ranking or ""


def save_params(directory: Path, params: Any, about: Mapping[str, Any]) -> None:
    """Write weights without optimizer state as the checkpoint of step 0, with little additional memory."""
    ocp = import_orbax()

    from jaxgpt.train.step import TrainState

    options = ocp.Context()
    options.array.saving.use_compression = False  # compression: a copy of the weights for only 8% less space
    options.memory.deepcopy_host_arrays = False  # no copy: the weights do not change during the write
    state = TrainState(jnp.zeros((), jnp.int32), params, None)
    with options, Saver(directory, TrainConfig()) as saver:
        saver.save(state, Info(0, about=about))


def seal(path: Path, info: Info) -> None:
    """Flush the files of a checkpoint to disk, and write checkpoint.json with their digests, atomically."""
    digests = {}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        digests[file.relative_to(path).as_posix()] = sha256_file(file)
    write_atomically(path / SEAL, _render(replace(info, sha256=digests)))


def _render(info: Info) -> str:
    """Format the content of checkpoint.json, including its own digest."""
    values = asdict(info)
    values["sha256"].pop(SEAL, None)
    content = json.dumps(values, allow_nan=False)
    values["sha256"][SEAL] = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps(values, indent=1) + "\n"


def read_info(path: Path) -> Info:
    """Read the checkpoint.json of a checkpoint; raise `UserError` if it is unreadable or has changed."""
    text = read_bytes(path / SEAL)
    with suppress(AttributeError, RecursionError, TypeError, ValueError):  # not JSON, or not an `Info`
        info = Info(**parse_json(text, SEAL))
        if info.step == int(path.name) and _render(info).encode() == text:
            return info
    raise UserError(f"{SEAL} has changed since it was written")


def saved_steps(directory: Path) -> list[int]:
    """List the steps of the checkpoints, ascending; [] if the directory is missing.

    Raises:
        UserError: if the directory cannot be read: a run must not start from step 0 again because of its permissions.
    """
    with reported(f"cannot read {directory}"), suppress(FileNotFoundError, NotADirectoryError):
        return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
    return []


def checkpoints(directory: Path) -> dict[int, Info]:
    """Return the `Info` of each checkpoint, keyed by step, ascending; skip damaged checkpoint.json files."""
    infos, _ = read_checkpoints(directory)
    return infos


def read_checkpoints(directory: Path) -> tuple[dict[int, Info], list[int]]:
    """Return the `Info` of each checkpoint, keyed by step, and the steps with a damaged checkpoint.json, ascending.

    A training process may delete checkpoints meanwhile: deleted checkpoints are omitted. `find_damage` describes the damage.
    """
    infos: dict[int, Info] = {}
    damaged: list[int] = []
    for step in saved_steps(directory):
        path = directory / str(step)
        try:
            infos[step] = read_info(path)
        except UserError:
            if path.is_dir():
                damaged.append(step)
    return infos, damaged


def resolve_step(directory: Path, which: str) -> int:
    """Resolve `last`, `best` (lowest validation loss; without losses: the last) or a number to a step.

    Raises:
        UserError: if the checkpoint does not exist, or the best is unknown because a checkpoint.json is damaged.
    """
    steps = saved_steps(directory)
    if not steps:
        message = f"no complete checkpoint in {directory}: training saves at evaluations and when it stops"
        kept = replaced_note(directory.parent)
        raise UserError(f"{message}; {kept}" if kept else message)
    if which == "best":
        infos, damaged = read_checkpoints(directory)
        if damaged:
            path = directory / str(max(damaged)) / SEAL
            raise UserError(
                f"{path} is damaged: restore it, or choose a step with --checkpoint, or --init-from RUN/checkpoints/STEP"
            )
        if not infos:  # a training process has deleted the listed checkpoints
            return resolve_step(directory, which)
        return best_step(infos)

    names = {"last": steps[-1]} | {str(step): step for step in steps}
    if which in names:
        return names[which]
    raise UserError(f"no checkpoint {which!r} in {directory}: use best, last or one of {', '.join(map(str, steps))}")


def best_step(infos: Mapping[int, Info]) -> int:
    """Return the step with the lowest validation loss; without losses, the last step.

    Losses on different validation data, or rankings of a different evaluator, than in the last checkpoint are not compared.
    """
    last = _ranked_on(infos, max(infos))
    comparable = {step: info for step, info in infos.items() if _ranked_on(infos, step) == last}
    losses = [(info.val_loss, step) for step, info in comparable.items() if info.val_loss is not None]
    if losses:
        _, step = min(losses)
        return step
    return max(infos)


def weights_at(init_from: str) -> Path:
    """Return the checkpoint of `--init-from`: the best checkpoint of RUN, or RUN/checkpoints/STEP."""
    path, which = parse_checkpoint(init_from)
    directory = open_run(path).checkpoints
    return directory / str(resolve_step(directory, which))


def kept_checkpoint_message(directory: Path) -> str:
    """Describe the checkpoint that a failed run can resume from."""
    try:
        steps = saved_steps(directory)
    except UserError as e:  # the reason of the failure must still be reported
        return str(e)
    return f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"


def find_damage(path: Path, parts: tuple[str, ...] = PARTS) -> str:
    """Describe the first damaged file, at the top level or in `parts` of a checkpoint, or return "".

    A checkpoint that a training process deletes meanwhile is not damaged.
    """
    damage = _damage(path, parts)
    if damage and not path.is_dir():
        return ""
    return damage


def _damage(path: Path, parts: tuple[str, ...]) -> str:
    """Describe the first file that is damaged or missing."""
    _check_readable(path / SEAL)
    try:
        digests = read_info(path).sha256
    except UserError as e:
        return str(e)
    for name, digest in digests.items():
        part, separator, _ = name.partition("/")
        is_other_part = bool(separator) and part not in parts
        if name == SEAL or is_other_part:
            continue
        _check_readable(path / name)
        try:
            if sha256_file(path / name) != digest:
                return f"{name} has changed since it was written"
        except (OSError, ValueError) as e:  # ValueError: a null byte in a forged name
            return f"{name} cannot be read ({getattr(e, 'strerror', e)})"
    return ""


def _check_readable(file: Path) -> None:
    """Raise `UserError` if this user may not read a file; the checkpoint is not damaged then."""
    try:
        with file.open("rb"):
            pass
    except PermissionError as e:
        raise UserError(f"cannot read {file}: {e.strerror}") from None
    except (OSError, ValueError):  # damage
        return


def latest_valid(directory: Path, note: Callable[[str], None]) -> Info | None:
    """Return the `Info` of the last intact checkpoint; rename and report newer, damaged checkpoints.

    Without checkpoints, returns None. If all are damaged, renames nothing and raises `UserError`. Deletes partial checkpoints.
    """
    for path in directory.glob(f"*{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)

    damaged: dict[int, str] = {}
    for step in reversed(saved_steps(directory)):
        damage = find_damage(directory / str(step))
        if damage:
            damaged[step] = damage
            continue
        for newer, reason in damaged.items():
            aside = directory / f"{newer}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (directory / str(newer)).rename(aside)
            note(f"checkpoint {newer} is not used: {reason}; it is kept as {aside}")
        return read_info(directory / str(step))

    if damaged:
        reasons = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
        fix = f"restore a checkpoint, or start again from step 0: jaxgpt train {directory.parent} --out NEW"
        raise UserError(f"no valid checkpoint in {directory}: {reasons}; {fix}")
    return None


def restore(directory: Path, step: int, like: TrainState) -> TrainState:
    """Restore a train state with the shardings of `like`; `latest_valid` must have checked the digests."""
    from jaxgpt.train.skip import init_statistics
    from jaxgpt.train.step import TrainState

    path = directory / str(step)
    sharding = like.step.sharding
    parts = {}
    for name, part in _parts(like).items():
        if name == "skip" and not (path / name).is_dir():  # a resume has enabled skipping
            parts[name] = jax.device_put(init_statistics(), sharding)
        else:
            parts[name] = _load(path, name, part)
    return TrainState(step=jax.device_put(np.int32(step), sharding), **parts)


def resolve_weights(directory: Path, which: str, part: str = "params") -> int:
    """Resolve the checkpoint `which` to a step, and verify its `part` (params or ema); raise `UserError` if damaged.

    If a training process deletes the checkpoint meanwhile, `which` is resolved again.
    """
    while True:
        step = resolve_step(directory, which)
        path = directory / str(step)
        damage = find_damage(path, (part,))
        # `prune` renames a checkpoint before it deletes files, so the files of an existing directory are complete.
        if not path.is_dir():
            continue
        if not damage:
            return step
        others = [other for other in checkpoints(directory) if other != step]
        fix = f"try --checkpoint {others[-1]}, or --init-from RUN/checkpoints/{others[-1]}" if others else "restore it"
        raise UserError(f"checkpoint {path} is damaged: {damage}; {fix}")


def read_params(directory: Path, step: int, like: Any, part: str = "params") -> Any:
    """Read `part` of a checkpoint with the shardings of `like`; `resolve_weights` must have checked the digests.

    Raises:
        UserError: if the part cannot be read or has different shapes, or a training process has deleted the checkpoint.
    """
    path = directory / str(step)
    try:
        params = _load(path, part, like)
    except UserError:
        if path.is_dir():
            raise
        params = None
    if not path.is_dir():
        raise UserError(
            f"checkpoint {path} was deleted by the training process while it was read: run the command again"
        )
    return params


def _parts(state: TrainState) -> dict[str, Any]:
    """Return the parts of a state, keyed by directory name; an imported model has only `params`."""
    return {name: part for name, part in state._asdict().items() if name != "step" and part is not None}


def _load(path: Path, part: str, like: Any) -> Any:
    """Restore a part of a checkpoint; raise `UserError` if it is unreadable or does not match `like`."""
    ocp = import_orbax()

    check_backslash(path)
    try:
        # Check shapes first: if Orbax finds a wrong shape while it reads arrays, its threads fail at process exit.
        saved = ocp.checkpointables_metadata(path.absolute()).metadata
        check_shapes(saved.get(part, {}), like)
        with _few_in_flight(like):
            return ocp.load_checkpointables(path.absolute(), {part: like})[part]
    except Exception as e:
        if is_peer_failure(e) or "RESOURCE_EXHAUSTED" in str(e):
            raise
        cause = e.__cause__ or e  # the mismatch, which Orbax's error omits
        raise UserError(f"{path} is damaged or does not match the settings: {part} ({one_line(cause, 200)})") from None


def _few_in_flight(like: Any) -> AbstractContextManager[Any]:
    """Limit the bytes that Orbax reads at a time to the largest array: by default, it reads all arrays at once."""
    ocp = import_orbax()

    largest = max((leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like)), default=0)
    options = ocp.Context()
    options.memory.read_concurrent_bytes = largest + IN_FLIGHT
    return options


def check_shapes(saved: Any, like: Any) -> None:
    """Raise `ValueError` if an array has different shapes in two trees."""
    shapes = _shapes(saved)
    wanted = _shapes(like)
    for name in sorted(shapes.keys() & wanted.keys()):
        if shapes[name] != wanted[name]:
            raise ValueError(f"{name} has the shape {list(shapes[name])}, not {list(wanted[name])}")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of a tree, keyed by path."""
    leaves = tree_leaves_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves if hasattr(leaf, "shape")}
