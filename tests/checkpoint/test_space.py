"""Free space is compared with the size of the checkpoints before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.replacement import KEPT, MOVED
from jaxgpt.checkpoint.retention import steps_to_keep
from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.space import check_space, format_bytes, most_checkpoints
from jaxgpt.config import TrainConfig
from jaxgpt.directories import REPLACED
from jaxgpt.errors import UserError
from jaxgpt.train.step import TrainState

WEIGHTS = {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)}
STATE = TrainState(jax.ShapeDtypeStruct((), jnp.int32), WEIGHTS, [WEIGHTS, WEIGHTS], None)  # 12 kB
TRAIN = TrainConfig(steps=1000, eval_every=10, keep_last=2, keep_best=1)  # 4 checkpoints at a time: 48 kB


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    disk = SimpleNamespace(total=10**9, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (disk.total, 0, disk.free))
    return disk


def notes_at(run: Run, replaced: bool = False) -> list[str]:
    notes: list[str] = []
    check_space(run, STATE, TRAIN, notes.append, replaced)
    return notes


def test_enough_space_for_all_checkpoints_is_silent(free: SimpleNamespace) -> None:
    free.free = 49_000
    assert notes_at(Run(Path("new"))) == []


def test_too_little_space_for_all_checkpoints_is_a_note(free: SimpleNamespace) -> None:
    free.free = 47_000
    [note] = notes_at(Run(Path("new")))
    assert note == (
        "a checkpoint takes about 12 kB, and the file system of new has 47 kB of free space: the run stores up to 4 at a time, "
        "48 kB; free space, or lower --train.keep-last and --train.keep-best"
    )


def test_too_little_space_for_the_weights_is_an_error(free: SimpleNamespace) -> None:
    """Optimizer states can be compressed to almost nothing; random weights cannot."""
    free.free = 4_000
    assert notes_at(Run(Path("new"))) != []
    free.free = 3_000
    with pytest.raises(
        UserError, match=r"takes about 12 kB, .* has 3 kB of free space: free at least 9 kB there, or move"
    ):
        notes_at(Run(Path("new")))


def test_present_checkpoints_already_occupy_their_space(free: SimpleNamespace) -> None:
    free.free = 25_000
    run = Run(Path("run"))
    for step in (10, 20):
        (run.checkpoints / str(step)).mkdir(parents=True)
    assert notes_at(run) == []
    (run.checkpoints / "20").rmdir()
    assert notes_at(run) != []


def test_a_replaced_run_frees_its_space(free: SimpleNamespace) -> None:
    run = Run(Path("run"))
    run.path.mkdir()
    (run.path / "metrics.jsonl").write_bytes(bytes(10_000))
    old = run.checkpoints / "10" / "params"
    old.mkdir(parents=True)
    (old / "array").write_bytes(bytes(40_000))
    assert notes_at(run, replaced=True) == []


def test_other_files_in_the_directory_of_a_replaced_run_are_kept(free: SimpleNamespace) -> None:
    free.free = 100
    run = Run(Path("run"))
    run.path.mkdir()
    (run.path / "corpus.txt").write_bytes(bytes(100_000))
    with pytest.raises(UserError, match="has 100 bytes of free space"):
        notes_at(run, replaced=True)


def test_deleting_a_link_to_checkpoints_frees_no_space(free: SimpleNamespace) -> None:
    Path("disk").mkdir()
    Path("disk/array").write_bytes(bytes(50_000))
    run = Run(Path("run"))
    run.path.mkdir()
    run.checkpoints.symlink_to(Path("disk").absolute())
    with pytest.raises(UserError, match="of free space"):
        notes_at(run, replaced=True)


def test_an_old_run_that_is_kept_until_the_first_step_frees_its_space(free: SimpleNamespace) -> None:
    free.free = 13_000
    run = Run(Path("run"))
    old = run.path / REPLACED
    old.mkdir(parents=True)
    for path in (run.path / "config.json", old / "config.json", old / MOVED, old / KEPT):
        path.write_text("{}")
    assert notes_at(run) != []
    (old / "file").write_bytes(bytes(50_000))
    assert notes_at(run) == []


def test_a_file_system_without_this_information_is_silent(free: SimpleNamespace) -> None:
    free.total = 0
    assert notes_at(Run(Path("new"))) == []


@pytest.mark.parametrize(
    ("train", "most"),
    [
        (TrainConfig(steps=1000, eval_every=10, keep_last=2, keep_best=1), 4),
        (TrainConfig(steps=1000, eval_every=10, keep_last=2, keep_best=1, keep_every=250), 8),
        (TrainConfig(steps=20, eval_every=10, keep_last=2, keep_best=1), 2),  # two evaluations
        (TrainConfig(steps=5, eval_every=10), 1),
        (TrainConfig(steps=20, eval_every=10, keep_last=2, keep_best=1, checkpoint_seconds=1.0), 3),
        (TrainConfig(steps=1000, eval_every=10, keep_last=2, keep_best=1, checkpoint_seconds=1.0), 5),
    ],
)
def test_the_largest_number_of_checkpoints(train: TrainConfig, most: int) -> None:
    assert most_checkpoints(train) == most


@pytest.mark.parametrize("seconds", [0.0, 1.0])
@pytest.mark.parametrize("evaluations", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(("keep_last", "keep_best"), [(1, 0), (2, 1), (3, 2)])
def test_the_largest_number_is_reached_and_never_exceeded(
    keep_last: int, keep_best: int, evaluations: int, seconds: float
) -> None:
    """With increasing losses, the best checkpoints are the first, so the last and the best are different checkpoints."""
    train = TrainConfig(
        steps=10 * evaluations,
        eval_every=10,
        keep_last=keep_last,
        keep_best=keep_best,
        checkpoint_seconds=seconds,
    )
    infos: dict[int, Info] = {}
    largest = 0
    for step in range(5, train.steps + 1, 5):
        is_temporary = step % train.eval_every != 0
        if is_temporary and not seconds:
            continue
        infos[step] = Info(step, None if is_temporary else float(step), 0, is_temporary)
        largest = max(largest, len(infos))
        infos = {each: infos[each] for each in sorted(steps_to_keep(infos, train))}
    assert largest == most_checkpoints(train)


@pytest.mark.parametrize(("count", "text"), [(12, "12 bytes"), (1234, "1.23 kB"), (999_700, "1 MB"), (5e9, "5 GB")])
def test_sizes_have_units(count: float, text: str) -> None:
    assert format_bytes(count) == text
