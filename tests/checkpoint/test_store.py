"""Checkpoints on disk: integrity, retention and locking."""

from __future__ import annotations

import gc
import random
import shutil
import subprocess
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import largest_file, small, small_run
from orbax.checkpoint import v1 as ocp

from jaxgpt.checkpoint import manifest
from jaxgpt.checkpoint.index import damage, latest_valid, resolve_step, steps, val_losses
from jaxgpt.checkpoint.run import new_run
from jaxgpt.checkpoint.store import Checkpoints, Keep, read_params, restore_state
from jaxgpt.config import Config, MeshConfig, UserError
from jaxgpt.data.tokenizer import make_tokenizer
from jaxgpt.errors import TrainingFailed
from jaxgpt.files import LOCK
from jaxgpt.train.skip import SkipStatistics, init_skip_state
from jaxgpt.train.step import TrainState, init_state
from jaxgpt.trainer.layout import shardings_of
from jaxgpt.trainer.program import build

CONFIG = Config(model=small("gpt2"))


def state(step: int, size: int = 8) -> TrainState:
    values = np.random.default_rng(step).normal(size=size).astype(np.float32)
    return TrainState(jnp.asarray(step), {"w": jnp.asarray(values)}, {"m": jnp.asarray(values**2)}, None)


def save(
    writer: Checkpoints, step: int, val_loss: float | None = None, *, temporary: bool = False, size: int = 8
) -> None:
    writer.save(state(step, size), val_loss, {"config": asdict(CONFIG)}, temporary=temporary)


def written(folder: Path, *which: int) -> Path:
    with Checkpoints(folder, Keep(last=9)) as writer:
        for step in which:
            save(writer, step)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of three steps; do not modify."""
    return written(tmp_path_factory.mktemp("three"), 1, 2, 3)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("rounds", [1, pytest.param(40, marks=pytest.mark.long)])
def test_damage_is_detected(three: Path, rounds: int) -> None:
    """Every file of a checkpoint with a flipped bit, truncated, and missing."""
    shutil.copytree(three / "3", "3")
    path, dice, made, missed = Path("3"), random.Random(0), 0, []
    assert damage(path) == ""
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
                missed += [] if damage(path) else [f"{kind} {file} at {place}"]
                file.write_bytes(content)
    print(f"corrupted checkpoints noticed: {made - len(missed)} of {made}")
    assert made > 50 * rounds
    assert not missed
    assert damage(path) == ""


def test_the_manifest_has_the_format_of_sha256sum(three: Path) -> None:
    command = ["sha256sum", "--check", "--strict", manifest.NAME]
    assert subprocess.run(command, cwd=three / "3", capture_output=True, check=False).returncode == 0
    listed = set(manifest.read(three / "3"))
    assert listed == {p.relative_to(three / "3").as_posix() for p in (three / "3").rglob("*") if p.is_file()} - {
        manifest.NAME
    }


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def of_another_model(path: Path) -> None:
    shutil.rmtree(path)
    with Checkpoints(path.parent, Keep(last=9)) as writer:
        writer.save(state(int(path.name)), None, {"config": asdict(CONFIG.with_model(n_embd=64))})


def array_file(path: Path) -> Path:
    return max((path / "params").rglob("d/*"), key=lambda p: p.stat().st_size)


DAMAGES = {
    "it is empty": empty,
    "commit_success.txt is missing": lambda path: (path / "commit_success.txt").unlink(),
    "MANIFEST.sha256 is missing": lambda path: (path / manifest.NAME).unlink(),
    "has changed since it was written": lambda path: flip(array_file(path), 20),
    "cannot be read (No such file": lambda path: array_file(path).unlink(),
    "its model.n_embd is 64, the run's is 16": of_another_model,
}


@pytest.mark.parametrize("words", DAMAGES)
def test_the_last_valid_checkpoint_is_used(three: Path, words: str) -> None:
    folder = Path("checkpoints")
    shutil.copytree(three, folder)
    DAMAGES[words](folder / "3")
    told: list[str] = []
    assert latest_valid(folder, CONFIG, told.append) == 2
    assert len(told) == 1
    assert words in told[0]
    assert told[0].startswith("checkpoint 3 is not used: ")
    assert told[0].endswith("it is kept as checkpoints/3.damaged")
    assert (folder / "3.damaged").is_dir()
    assert steps(folder) == [1, 2]
    with Checkpoints(folder, Keep(last=9)) as writer:  # the step can be saved again
        save(writer, 3)
    assert latest_valid(folder, CONFIG, told.append) == 3


def test_none_is_valid(three: Path) -> None:
    """Nothing is renamed then, because config.json may be the damaged file."""
    shutil.copytree(three, "checkpoints")
    before = sorted(Path("checkpoints").rglob("*"))
    with pytest.raises(UserError, match=r"no valid checkpoint in checkpoints: 3: its model.n_layer is 2.*; 2: .*; 1: "):
        latest_valid(Path("checkpoints"), CONFIG.with_model(n_layer=3), print)
    assert latest_valid(Path("nowhere"), CONFIG, print) is None
    assert sorted(Path("checkpoints").rglob("*")) == before


def test_a_checkpoint_of_an_older_version_needs_no_manifest(three: Path) -> None:
    shutil.copytree(three / "3", "3")
    Path("3", manifest.NAME).unlink()
    metadata = Path("3/_CHECKPOINT_METADATA")
    metadata.write_text(metadata.read_text().replace('"manifest": true, ', ""))
    assert damage(Path("3")) == ""


def test_only_files_that_are_read_are_checked(three: Path) -> None:
    shutil.copytree(three, "checkpoints")
    abstract = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
    [file] = Path("checkpoints/3/opt_state/d").iterdir()
    flip(file, 5)
    np.testing.assert_array_equal(
        read_params(Path("checkpoints"), "last", abstract, False)[0]["w"], state(3).params["w"]
    )
    flip(array_file(Path("checkpoints/3")), 5)
    with pytest.raises(UserError, match=r"checkpoint checkpoints/3 is damaged: params/.*; try --checkpoint 2") as error:
        read_params(Path("checkpoints"), "last", abstract, False)
    assert "\n" not in str(error.value)


def test_a_reader_retries_if_its_checkpoint_is_deleted(monkeypatch: pytest.MonkeyPatch, three: Path) -> None:
    """Training deletes old checkpoints while others read."""
    shutil.copytree(three, "checkpoints")
    chosen = iter([1, 3, 3])
    monkeypatch.setattr("jaxgpt.checkpoint.store.resolve_step", lambda *_: next(chosen))
    shutil.rmtree("checkpoints/1")
    abstract = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
    np.testing.assert_array_equal(
        read_params(Path("checkpoints"), "last", abstract, False)[0]["w"], state(3).params["w"]
    )


def test_the_state_of_another_optimizer_raises_one_line(three: Path) -> None:
    """Without warnings about abandoned coroutines of Orbax."""
    other = TrainState(jnp.asarray(3), state(3).params, [state(3).opt_state], None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(UserError, match="checkpoint of this run: opt_state does not match"):
            restore_state(three, 3, other)
        gc.collect()
    assert not [w for w in caught if "never awaited" in str(w.message)]


def test_retention() -> None:
    folder, keep = Path("checkpoints"), Keep(last=2, best=1, every=5)
    with Checkpoints(folder, keep) as writer:
        for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 3.5, 2.0, 6.0], 1):
            save(writer, step, loss)
    assert steps(folder) == [2, 5, 6, 7]
    with Checkpoints(folder, keep) as writer:  # the best checkpoint is known after a restart
        for step, loss in ((8, 2.0), (9, 3.0)):
            save(writer, step, loss)
        assert resolve_step(folder, "best") == 2
        save(writer, 10, 0.5)
        save(writer, 11)
    assert steps(folder) == [5, 10, 11]
    assert val_losses(folder)[10] == 0.5


def test_a_temporary_checkpoint_is_kept_until_the_next() -> None:
    folder = Path("checkpoints")
    with Checkpoints(folder, Keep(last=1, best=1)) as writer:
        save(writer, 1, 1.0)
        save(writer, 2, 2.0)
        save(writer, 3, temporary=True)
    assert steps(folder) == [1, 2, 3]
    with Checkpoints(folder, Keep(last=1, best=1)) as writer:
        save(writer, 4, temporary=True)
        writer.wait()
        assert steps(folder) == [1, 2, 4]
        save(writer, 5, 3.0)
    assert steps(folder) == [1, 5]


def test_a_loss_recorded_later_counts() -> None:
    folder = Path("checkpoints")
    with Checkpoints(folder, Keep(last=1, best=1)) as writer:
        save(writer, 1, temporary=True)
    with Checkpoints(folder, Keep(last=1, best=1)) as writer:
        writer.note_val_loss(1, 0.1)
        assert damage(folder / "1") == ""
        save(writer, 2, 0.2)
        save(writer, 3, 0.3)
    assert steps(folder) == [1, 3]
    assert val_losses(folder) == {1: 0.1, 3: 0.3}


def test_half_deleted_checkpoints_are_removed() -> None:
    folder = written(Path("checkpoints"), 1, 2, 3)
    shutil.rmtree(folder / "1" / "params")
    (folder / "1" / "_CHECKPOINT_METADATA").unlink()
    (folder / "4.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(folder, Keep(last=2)) as writer:
        save(writer, 4)
    assert {p.name for p in folder.iterdir()} == {"3", "4", "metadata"}


def test_a_full_disk() -> None:
    folder = Path("checkpoints")
    with Checkpoints(folder, Keep(last=1)) as writer:
        save(writer, 1)
        writer.wait()
        with largest_file(50_000):
            save(writer, 2, size=100_000)
            with pytest.raises(
                TrainingFailed, match=r"a checkpoint could not be written \(.*File too large\)$"
            ) as error:
                writer.wait()
            assert "\n" not in str(error.value)
        assert latest_valid(folder, CONFIG, print) == 1
        save(writer, 3)
    assert latest_valid(folder, CONFIG, print) == 3


@pytest.mark.parametrize("which", ["4", 5000 * "1", "-1", "\u00b2", ""])
def test_a_checkpoint_that_is_not_there_is_one_line(three: Path, which: str) -> None:
    with pytest.raises(UserError, match=r"^no checkpoint .* best, last or one of 1, 2, 3$"):
        resolve_step(three, which)


@pytest.mark.parametrize("which", ["2", "0002", "\u0662"])
def test_a_step_may_be_written_with_other_digits(three: Path, which: str) -> None:
    assert resolve_step(three, which) == 2


def test_restore_on_another_mesh() -> None:
    """From 8 devices to 2 x 2 and to one: the same values, with the requested sharding."""
    config = small_run().with_model(vocab_size=17)
    programs = [
        build(replace(config, mesh=mesh))
        for mesh in (MeshConfig(data=1, fsdp=8), MeshConfig(data=1, fsdp=2, tensor=2), MeshConfig(data=1))
    ]
    first = jax.device_get(programs[2].init())
    whole = jax.device_put(first, shardings_of(programs[0].layout.abstract_state))._replace(step=jnp.asarray(1))
    for step, program in enumerate(programs[1:], 1):
        with Checkpoints(Path("checkpoints")) as writer:
            writer.save(whole, None, {})
        whole = restore_state(Path("checkpoints"), step, program.layout.abstract_state)
        assert jax.tree.map(lambda leaf: leaf.sharding, whole) == shardings_of(program.layout.abstract_state)
        for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(first.params), strict=True):
            np.testing.assert_array_equal(a, b)
        whole = whole._replace(step=jnp.asarray(step + 1))


@pytest.mark.parametrize("restored", ["plain", "skipping"])
@pytest.mark.parametrize("saved", ["plain", "guard", "skipping"])
def test_a_resumed_run_can_start_or_stop_skipping_updates(saved: str, restored: str) -> None:
    """Also from checkpoints of older versions, which kept the statistics of skipped updates separately."""
    plain = init_state({"w": jnp.arange(3.0)}, optax.adam(0.1))
    inner = jax.tree.map(lambda leaf: leaf + 5, plain.opt_state)
    statistics = SkipStatistics(*jnp.arange(3), jnp.float32(2.5), jnp.float32(0.5))
    skipping = init_skip_state(inner)._replace(statistics=statistics)
    parts = {"params": plain.params, "opt_state": skipping if saved == "skipping" else inner}
    parts |= {"guard": statistics} if saved == "guard" else {}
    ocp.save_checkpointables(Path("checkpoints/7").absolute(), parts)

    expected = plain._replace(step=jnp.int32(7), opt_state=inner)
    if restored == "skipping":
        expected = expected._replace(opt_state=skipping if saved != "plain" else init_skip_state(inner))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), expected)
    state = restore_state(Path("checkpoints"), 7, abstract)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_concurrent_starts_get_separate_folders() -> None:
    """Each folder appears locked and with its settings, and no temporary files remain."""
    config, tokenizer = small_run(), make_tokenizer("byte", "", 0, 0)
    barrier = threading.Barrier(8)

    def start(_: int) -> tuple[Path, set[str]]:
        barrier.wait()
        with new_run("", config, tokenizer) as run:
            barrier.wait()
            return run.path, {p.name for p in run.path.iterdir()}

    with ThreadPoolExecutor(8) as pool:
        started = list(pool.map(start, range(8)))
    names = {"python-char", *(f"python-char-{n}" for n in range(2, 9))}
    assert {path.name for path, _ in started} == {p.name for p in Path("runs").iterdir()} == names
    assert all(files == {"config.json", "tokenizer.json", LOCK} for _, files in started)
    with pytest.raises(UserError, match="already holds a run"), new_run("runs/python-char", config, tokenizer):
        pass
