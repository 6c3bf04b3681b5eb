"""A command that is killed at its n-th file operation leaves the old or the new files, and can be repeated.

A process runs the command and ends itself with `os._exit`, as SIGKILL would, just before its n-th file operation in the
directory of the target.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from folders import SMALL, TEXT, hf_folder, run_folder
from helpers import flags

import jaxgpt
from jaxgpt.checkpoint.index import saved_steps
from jaxgpt.checkpoint.replacement import recover
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli import main
from jaxgpt.files import sha256_file

KILLED = 9
PLACE = "place"  # directory of the targets
KINDS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
SHORT = flags(
    data__path="text.txt",
    data__tokenizer="byte",
    model__n_layer=1,
    model__n_head=2,
    model__n_embd=8,
    model__block_size=8,
    train__batch_size=2,
    train__steps=2,
    train__eval_every=2,
    train__sample_tokens=0,
    mesh__data=1,
)


class Command(NamedTuple):
    """A command, and how its result is read."""

    words: str
    read: Callable[[Path], object]
    replaces: bool = False  # whether the target holds an old run before
    target: str = "out"  # its name in `PLACE`


def weights(run: Path) -> bytes:
    recover(run)
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jaxgpt.load(run).params))


def digests(directory: Path) -> dict[str, str]:
    """Return the digest of each file of a directory, or of a file."""
    files = [file for file in (directory, *directory.rglob("*")) if file.is_file()]
    return {file.relative_to(directory).as_posix(): sha256_file(file) for file in files}


COMMANDS = {
    "import": Command("import hf place/out", weights),
    "import adapter": Command("import adapter place/out --init-from base", weights),
    "export": Command("export base place/out", digests),
    "export to GGUF": Command("export base place/out.gguf", digests, target="out.gguf"),
    "export adapter": Command("export lora place/out --adapter", digests),
    "train --overwrite": Command(" ".join(["train python-char --out place/out --overwrite", *SHORT]), weights, True),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a run, a run with adapters and its exported adapter, and a text; do not modify."""
    folder = tmp_path_factory.mktemp("sources")
    before = Path.cwd()
    os.chdir(folder)
    Path("text.txt").write_text(TEXT * 100)
    hf_folder(Path("hf"))
    run_folder(Path("base"), SMALL)
    lora = flags(data__path="text.txt", lora__rank=2, train__batch_size=2, train__steps=1, train__sample_tokens=0)
    assert main(["train", "finetune", "--init-from", "base", "--out", "lora", *lora, "--mesh.data", "1"]) == 0
    assert main("export lora adapter --adapter".split()) == 0
    os.chdir(before)
    return folder


def child(words: str, kill_at: int, compiled: str) -> None:
    """Run a command that ends before its n-th file operation (0: never); write the number of operations."""
    printed = os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_compilation_cache_dir", compiled)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    count = 0

    def hook(event: str, values: tuple[object, ...]) -> None:
        nonlocal count
        if event not in KINDS or PLACE not in Path(str(values[0])).parts:
            return
        count += 1
        if count == kill_at:
            os._exit(KILLED)

    sys.addaudithook(hook)
    code = main(words.split())
    Path("operations").write_text(str(count))
    os._exit(code)


def run(words: str, kill_at: int = 0) -> int:
    """Return the exit code of a command in a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [__name__, "jaxgpt.cli.train", "jaxgpt.cli.run_printer", "jaxgpt.convert.peft.adapters", "orbax.checkpoint.v1"]
    )
    process = context.Process(target=child, args=(words, kill_at, jax.config.jax_compilation_cache_dir))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.ci), pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_leaves_the_old_or_the_new_files_and_can_be_repeated(
    name: str, kills: int, sources: Path
) -> None:
    command = COMMANDS[name]
    out = Path(PLACE, command.target)
    shutil.copytree(sources, ".", dirs_exist_ok=True)
    Path(PLACE).mkdir()

    def prepare() -> object:
        shutil.rmtree(PLACE)
        Path(PLACE).mkdir()
        if not command.replaces:
            return None
        run_folder(out, SMALL, seed=1)
        return command.read(out)

    prepare()
    assert run(command.words) == 0
    new = command.read(out)
    operations = int(Path("operations").read_text())
    points = sorted({round(operations * (k + 0.7) / kills) for k in range(kills)})
    print(f"{name}: {len(points)} of {operations} operations")
    for point in points:
        old = prepare()
        code = run(command.words, point)
        if code == 0:  # the number of operations varies by a few
            assert point > 0.9 * operations, point
            continue
        assert code == KILLED, (point, Path("printed").read_text())
        left = state(command, out)
        assert left in (old, new) or is_started(command, out), point
        is_complete = left == new and not command.replaces  # the second command keeps the complete result
        assert run(command.words) == (2 if is_complete else 0), (point, Path("printed").read_text())
        assert command.read(out) == new, point
        assert is_complete or {path.name for path in Path(PLACE).iterdir()} == {out.name}, point


def state(command: Command, out: Path) -> object:
    """Return what a command has left; None: nothing that looks complete."""
    if command.read is weights:
        recover(out)
        if not Run(out).exists() or not saved_steps(out / "checkpoints"):
            return None
    elif not out.exists():
        return None
    return command.read(out)


def is_started(command: Command, out: Path) -> bool:
    """Return whether a directory holds a new run that can be resumed, without a checkpoint."""
    return command.replaces and Run(out).config().train.steps == 2
