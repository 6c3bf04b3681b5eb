"""Checkpoints on disk: integrity and retention."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import largest_file, small, small_run
from orbax.checkpoint import v1 as ocp

from jaxgpt.checkpoint import index, intact, retention, source, store
from jaxgpt.checkpoint.data_record import about_data
from jaxgpt.checkpoint.index import checkpoints, resolve_step, saved_steps
from jaxgpt.checkpoint.info import SEAL, Info, read_info, seal
from jaxgpt.checkpoint.intact import find_damage, latest_valid, resolve_weights
from jaxgpt.checkpoint.retention import prune, steps_to_keep
from jaxgpt.checkpoint.saver import Saver
from jaxgpt.checkpoint.store import read_params, restore
from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.data import open_data
from jaxgpt.errors import TrainingFailed, UserError
from jaxgpt.train.skip import SkipStatistics, init_statistics
from jaxgpt.train.step import TrainState, init_state
from jaxgpt.trainer.build import build
from jaxgpt.trainer.states import shardings_of

CONFIG = Config(model=small("gpt2"))
LIKE = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
FOLDER = Path("checkpoints")


def state(step: int, size: int = 8) -> TrainState:
    values = np.random.default_rng(step).normal(size=size).astype(np.float32)
    return TrainState(jnp.asarray(step), {"w": jnp.asarray(values)}, {"m": jnp.asarray(values**2)}, None)


def save(saver: Saver, step: int, ranking: float | None = None, *, temporary: bool = False, size: int = 8) -> None:
    saver.save(state(step, size), Info(step, ranking, 10 * step, temporary, {"config": asdict(CONFIG)}))


def keeping(last: int, best: int = 1, every: int = 0) -> Saver:
    return Saver(FOLDER, TrainConfig(keep_last=last, keep_best=best, keep_every=every))


def steps() -> list[int]:
    return list(checkpoints(FOLDER))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of three steps; do not modify."""
    folder = tmp_path_factory.mktemp("three")
    with Saver(folder, TrainConfig(keep_last=9)) as saver:
        for step in (1, 2, 3):
            save(saver, step)
    return folder


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("rounds", [1, pytest.param(40, marks=pytest.mark.long)])
def test_damage_is_detected(three: Path, rounds: int) -> None:
    """Flip a bit of each file of a checkpoint, truncate it, and delete it."""
    shutil.copytree(three / "3", "3")
    path, dice, made, missed = Path("3"), random.Random(0), 0, []
    assert find_damage(path) == ""
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        content = file.read_bytes()
        for _ in range(rounds):
            for kind in ("flip", "truncate", "delete"):
                place = dice.randrange(len(content)) if content else 0
                if kind == "delete":
                    file.unlink()
                elif not content:
                    continue
                elif kind == "flip":
                    flip(file, place)
                else:
                    file.write_bytes(content[:place])
                made += 1
                missed += [] if find_damage(path) else [f"{kind} {file} at {place}"]
                file.write_bytes(content)
    print(f"corrupted checkpoints noticed: {made - len(missed)} of {made}")
    assert made > 50 * rounds
    assert not missed
    assert find_damage(path) == ""


def test_every_bit_of_the_seal_counts(three: Path) -> None:
    shutil.copytree(three / "3", "3")
    content = Path("3", SEAL).read_bytes()
    for place in range(0, len(content), 31):
        flip(Path("3", SEAL), place)
        assert find_damage(Path("3")) == f"{SEAL} has changed since it was written"
        Path("3", SEAL).write_bytes(content)


def test_the_best_checkpoint_is_unknown_if_a_seal_is_damaged(three: Path) -> None:
    shutil.copytree(three, FOLDER)
    flip(FOLDER / "2" / SEAL, 20)
    assert steps() == [1, 3]
    with pytest.raises(UserError, match=r"2/checkpoint\.json is damaged: .*choose a step with --checkpoint"):
        resolve_step(FOLDER, "best")
    assert (resolve_step(FOLDER, "last"), resolve_step(FOLDER, "2")) == (3, 2)


def array_file(path: Path) -> Path:
    return max((path / "params").rglob("d/*"), key=lambda p: p.stat().st_size)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "checkpoint.json has changed since it was written": lambda path: flip(path / SEAL, 20),
    "has changed since it was written": lambda path: flip(array_file(path), 20),
    "cannot be read (No such file": lambda path: array_file(path).unlink(),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_the_last_valid_checkpoint_is_used(three: Path, reason: str) -> None:
    shutil.copytree(three, FOLDER)
    DAMAGES[reason](FOLDER / "3")
    notes: list[str] = []
    assert latest_valid(FOLDER, notes.append).step == 2
    [note] = notes
    assert note.startswith("checkpoint 3 is not used: ")
    assert reason in note
    assert note.endswith("it is kept as checkpoints/3.damaged")
    assert (FOLDER / "3.damaged").is_dir()
    assert steps() == [1, 2]
    with keeping(last=9) as saver:  # the step can be saved again
        save(saver, 3)
    assert latest_valid(FOLDER, notes.append).step == 3


def test_none_is_valid(three: Path) -> None:
    """If no checkpoint is valid, none is renamed, and the error lists the reasons."""
    shutil.copytree(three, FOLDER)
    for path in FOLDER.iterdir():
        flip(path / SEAL, 20)
    before = sorted(FOLDER.rglob("*"))
    with pytest.raises(UserError, match=r"no valid checkpoint in checkpoints: 3: .*; 2: .*; 1: checkpoint.json has"):
        latest_valid(FOLDER, print)
    assert latest_valid(Path("nowhere"), print) is None
    assert sorted(FOLDER.rglob("*")) == before


def test_only_files_that_are_read_are_checked(three: Path) -> None:
    shutil.copytree(three, FOLDER)
    [file] = (FOLDER / "3/opt_state/d").iterdir()
    flip(file, 5)
    step = resolve_weights(FOLDER, "last")
    np.testing.assert_array_equal(read_params(FOLDER, step, LIKE)["w"], state(3).params["w"])
    flip(array_file(FOLDER / "3"), 5)
    with pytest.raises(UserError, match=r"checkpoints/3 is damaged: params/.*; try --checkpoint 2") as error:
        resolve_weights(FOLDER, "last")
    assert "\n" not in str(error.value)


def delete(step: int) -> None:
    """Delete a checkpoint as `prune` does."""
    shutil.rmtree((FOLDER / str(step)).rename(FOLDER / f"{step}.partial"))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("reader", ["read_info", "sha256_file"])
def test_a_checkpoint_deleted_while_it_is_read_is_not_damaged(
    reader: str, before: bool, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint is deleted before or after a function reads a part of it."""
    shutil.copytree(three, FOLDER)
    read = getattr(intact, reader)

    def racing(*args: Any) -> Any:
        if before and (FOLDER / "3").exists():
            delete(3)
        result = read(*args)
        if (FOLDER / "3").exists():
            delete(3)
        return result

    monkeypatch.setattr(intact, reader, racing)
    step = resolve_weights(FOLDER, "last")
    assert step == 2
    np.testing.assert_array_equal(read_params(FOLDER, step, LIKE)["w"], state(2).params["w"])


@pytest.mark.parametrize("before", [True, False])
def test_weights_deleted_while_they_are_read_are_not_damaged(
    before: bool, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(three, FOLDER)
    read = store._load

    def racing(*args: Any) -> Any:
        if before:
            delete(3)
        result = read(*args)
        if not before:
            delete(3)
        return result

    monkeypatch.setattr(store, "_load", racing)
    with pytest.raises(UserError, match="checkpoint checkpoints/3 was deleted by the training process"):
        read_params(FOLDER, 3, LIKE)


def test_a_source_is_opened_again_if_its_checkpoint_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(NamedTuple):
        step: int
        exists: bool

    opened = [Opened(3, exists=False), Opened(4, exists=True)]
    monkeypatch.setattr(source, "open_source", lambda *_: opened.pop(0))

    def read(opened: Any) -> str:
        if not opened.exists:
            raise UserError("deleted")
        return f"weights of step {opened.step}"

    assert source.read_source("run", "last", read) == ((4, True), "weights of step 4")


def test_the_best_checkpoint_is_chosen_again_if_it_is_deleted(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(three, FOLDER)
    listed = [[1, 2, 3, 4], [1, 2, 3]]  # step 4 is deleted after the first list
    monkeypatch.setattr(index, "saved_steps", lambda _: listed.pop(0) if listed[1:] else listed[0])
    infos, damaged = index.read_checkpoints(FOLDER)
    assert (list(infos), damaged) == ([1, 2, 3], [])
    assert resolve_step(FOLDER, "best") == 3


def test_only_directories_named_by_a_step_are_checkpoints(three: Path) -> None:
    shutil.copytree(three, FOLDER)
    (FOLDER / "99").touch()
    (FOLDER / "20").symlink_to("gone")
    (FOLDER / "007").mkdir()
    (FOLDER / "٣٠").mkdir()
    assert saved_steps(FOLDER) == [1, 2, 3]
    assert resolve_weights(FOLDER, "last") == resolve_step(FOLDER, "last") == 3
    last = latest_valid(FOLDER, pytest.fail)
    assert last is not None
    assert last.step == 3


def test_a_link_to_a_checkpoint_is_a_checkpoint(three: Path) -> None:
    FOLDER.mkdir()
    (FOLDER / "3").symlink_to(three / "3")
    assert resolve_weights(FOLDER, "best") == 3


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_listed_checkpoint_without_a_directory_ends_the_search(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "saved_steps", lambda _: [20])
    with pytest.raises(UserError, match="cannot read checkpoints/20: it is listed, but is not a directory"):
        resolve_weights(FOLDER, which)


def test_reading_while_checkpoints_are_written_and_pruned_finds_no_damage() -> None:
    """One thread commits and prunes checkpoints without pause; another resolves and checks them."""
    FOLDER.mkdir()
    done = threading.Event()

    def commit(step: int) -> None:
        path = FOLDER / f"{step}.partial"
        (path / "params").mkdir(parents=True)
        (path / "params/array").write_bytes(bytes(10_000))
        seal(path, Info(step, ranking=1 / step))
        path.rename(path.with_suffix(""))
        prune(FOLDER, TrainConfig(keep_last=2, keep_best=1))

    def train() -> None:
        for step in range(3, 70):
            commit(step)
        done.set()

    for step in (1, 2):
        commit(step)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        while not done.is_set():
            for which in ("best", "last"):
                assert find_damage(FOLDER / str(resolve_step(FOLDER, which))) == ""
            assert index.read_checkpoints(FOLDER)[1] == []
        training.result()


def test_the_state_of_another_optimizer_raises_one_line(three: Path) -> None:
    """Errors leave no warnings about abandoned Orbax coroutines."""
    other = TrainState(jnp.asarray(3), state(3).params, [state(3).opt_state], None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(UserError, match="3 is damaged or does not match the settings: opt_state"):
            restore(three, 3, other)
        gc.collect()
    assert not [w for w in caught if "never awaited" in str(w.message)]


def test_what_is_kept() -> None:
    """Keep the newest, the last n, the best n and every n-th checkpoint, and no temporary checkpoint but the newest."""
    losses = [5.0, 1.0, 4.0, None, 3.0, 1.0, 2.0]
    infos = {step: Info(step, loss) for step, loss in enumerate(losses, 1)}
    assert steps_to_keep(infos, TrainConfig(keep_last=2, keep_best=1, keep_every=4)) == {2, 4, 6, 7}
    assert steps_to_keep(infos, TrainConfig(keep_last=1, keep_best=0)) == {7}
    assert steps_to_keep(infos, TrainConfig(keep_last=1, keep_best=3)) == {2, 6, 7}
    infos[6], infos[7] = (replace(infos[step], temporary=True) for step in (6, 7))
    assert steps_to_keep(infos, TrainConfig(keep_last=1, keep_best=1)) == {2, 5, 7}


def test_retention() -> None:
    with keeping(last=2, every=5) as saver:
        for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 3.5, 2.0, 6.0], 1):
            save(saver, step, loss)
    assert steps() == [2, 5, 6, 7]
    with keeping(last=2, every=5) as saver:  # the best checkpoint is known after a restart
        save(saver, 8, 2.0)
        save(saver, 9, temporary=True)
        saver.wait()
        assert steps() == [2, 5, 7, 8, 9]
        assert resolve_step(FOLDER, "best") == 2
        save(saver, 10, 0.5)
        save(saver, 11)
    assert steps() == [5, 10, 11]
    assert (checkpoints(FOLDER)[10].ranking, checkpoints(FOLDER)[10].tokens) == (0.5, 100)


def test_a_loss_recorded_later_counts() -> None:
    with keeping(last=1) as saver:
        save(saver, 1, temporary=True)
    with keeping(last=1) as saver:
        saver.save_info(Info(1, 0.1))
        assert find_damage(FOLDER / "1") == ""
        save(saver, 2, 0.2)
        save(saver, 3, 0.3)
    assert {step: info.ranking for step, info in checkpoints(FOLDER).items()} == {1: 0.1, 3: 0.3}
    flip(array_file(FOLDER / "3"), 20)
    with keeping(last=1) as saver:
        saver.save_info(Info(3, 0.2))
    assert "has changed since it was written" in find_damage(FOLDER / "3"), "new info does not hide damage"


def test_what_killed_processes_left_is_deleted(three: Path) -> None:
    """Files of processes killed while they wrote (steps 2 and 3) or deleted (step 1) a checkpoint are deleted."""
    shutil.copytree(three, FOLDER)
    for name in ("1.partial", "2.partial.orbax-checkpoint-tmp", "3.partial"):
        (FOLDER / name[0]).rename(FOLDER / name)
    (FOLDER / "notes").mkdir()
    assert latest_valid(FOLDER, print) is None
    assert {p.name for p in FOLDER.iterdir()} == {"notes"}


def test_a_checkpoint_without_its_seal_is_kept(three: Path) -> None:
    shutil.copytree(three, FOLDER)
    (FOLDER / "3" / SEAL).unlink()
    notes: list[str] = []
    assert latest_valid(FOLDER, notes.append).step == 2
    assert "checkpoint 3 is not used: cannot read checkpoints/3/checkpoint.json: No such file" in notes[0]
    assert (FOLDER / "3.damaged/params").is_dir()
    for step in (1, 2):
        (FOLDER / str(step) / SEAL).unlink()
    with pytest.raises(UserError, match=r"no valid checkpoint in checkpoints: 2: cannot read .*; restore a checkpoint"):
        latest_valid(FOLDER, print)
    assert (FOLDER / "2/params").is_dir()


def test_a_full_disk() -> None:
    with keeping(last=1) as saver:
        save(saver, 1)
        saver.wait()
        with largest_file(50_000):
            save(saver, 2, size=100_000)
            with pytest.raises(TrainingFailed, match=r"checkpoint could not be written \(.*File too large\)$") as error:
                saver.wait()
            assert "\n" not in str(error.value)
        assert latest_valid(FOLDER, print).step == 1
        save(saver, 3)
    assert latest_valid(FOLDER, print).step == 3


def test_an_old_checkpoint_that_cannot_be_deleted_is_one_note() -> None:
    """The new checkpoint is written, and the run goes on."""
    notes: list[str] = []
    with Saver(FOLDER, TrainConfig(keep_last=1), notes.append) as saver:
        save(saver, 1)
        saver.wait()
        (FOLDER / "1.partial/left").mkdir(parents=True)
        save(saver, 2)
        save(saver, 3)
    assert steps() == [1, 3]
    assert notes == ["cannot delete the old checkpoint checkpoints/1: Directory not empty"]


def test_an_old_checkpoint_that_is_already_deleted_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = {step: Info(step) for step in (1, 2)}
    monkeypatch.setattr(retention, "checkpoints", lambda _: infos)
    assert prune(FOLDER, TrainConfig(keep_last=1)) == ""


def test_a_rename_is_flushed_before_older_checkpoints_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[list[str]] = []
    fsync = os.fsync
    with keeping(last=1) as saver:
        save(saver, 1)
        saver.wait()

        def flush(descriptor: int) -> None:
            fsync(descriptor)
            if os.path.samestat(os.fstat(descriptor), FOLDER.stat()):
                listed.append(sorted(path.name for path in FOLDER.iterdir()))

        monkeypatch.setattr(os, "fsync", flush)
        save(saver, 2)
    assert (listed, steps()) == ([["1", "2"]], [2])


def test_an_error_when_a_write_starts_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ocp, "save_checkpointables_async", fail)
    full = pytest.raises(TrainingFailed, match=r"^a checkpoint could not be written \(No space left on device\)$")
    with keeping(last=1) as saver, full:
        save(saver, 1)


@pytest.mark.parametrize("which", ["4", 5000 * "1", "-1", "0002", "\u00b2", ""])
def test_a_missing_checkpoint_is_one_line(three: Path, which: str) -> None:
    with pytest.raises(UserError, match=r"^no checkpoint .* best, last or one of 1, 2, 3$"):
        resolve_step(three, which)


def test_restore_on_another_mesh() -> None:
    """Values saved from 8 devices are restored to 2 x 2 devices and to one device, with the requested sharding."""
    config = small_run().with_model(vocab_size=17)
    programs = [
        build(replace(config, mesh=mesh))
        for mesh in (MeshConfig(data=1, fsdp=8), MeshConfig(data=1, fsdp=2, tensor=2), MeshConfig(data=1))
    ]
    first = jax.device_get(programs[2].init())
    whole = jax.device_put(first, shardings_of(programs[0].abstract.state))
    for step, program in enumerate(programs[1:], 1):
        with keeping(last=1) as saver:
            saver.save(whole, Info(step))
        whole = restore(FOLDER, step, program.abstract.state)
        assert whole.step == step
        assert jax.tree.map(lambda leaf: leaf.sharding, whole) == shardings_of(program.abstract.state)
        for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(first.params), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("restored", ["plain", "skipping"])
@pytest.mark.parametrize("saved", ["plain", "skipping"])
def test_a_resumed_run_can_start_or_stop_skipping_updates(saved: str, restored: str) -> None:
    plain = init_state({"w": jnp.arange(3.0)}, optax.adam(0.1))
    plain = plain._replace(step=jnp.int32(7), opt_state=jax.tree.map(lambda leaf: leaf + 5, plain.opt_state))
    statistics = SkipStatistics(*jnp.arange(3), jnp.float32(2.5), jnp.float32(0.5))
    states = {"plain": plain, "skipping": plain._replace(skip=statistics)}
    with keeping(last=1) as saver:
        saver.save(states[saved], Info(7))

    expected = (
        states[restored] if saved == "skipping" or restored == "plain" else plain._replace(skip=init_statistics())
    )
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), expected)
    result = restore(FOLDER, 7, abstract)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_names_of_data_that_are_not_utf8_are_escaped_in_a_checkpoint(tmp_path: Path) -> None:
    """Python reads such names with surrogates. A checkpoint that contains one could not be read again."""
    texts = tmp_path / "texts"
    texts.mkdir()
    names = ["a.txt", os.fsdecode(b"caf\xe9.txt"), os.fsdecode(b"caf\xe8.txt")]
    for name in names:
        (texts / name).write_text("some text " * 20)
    data = open_data(Config(data=DataConfig(path=str(texts)), model=ModelConfig(block_size=8)))
    checkpoint = tmp_path / "3"
    checkpoint.mkdir()
    seal(checkpoint, Info(3, about=about_data(data)))
    [files] = read_info(checkpoint).about["files"].values()
    assert [*files] == ["a.txt", "caf\\udce8.txt", "caf\\udce9.txt"]
