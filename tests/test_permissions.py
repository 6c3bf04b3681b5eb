"""Paths that the user may not read, and links to missing directories: one line, and nothing is renamed or restarted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from folders import SMALL, run_folder

from jaxgpt.checkpoint.index import saved_steps
from jaxgpt.checkpoint.info import SEAL
from jaxgpt.checkpoint.intact import latest_valid
from jaxgpt.checkpoint.new_path import check_free
from jaxgpt.checkpoint.run import open_run
from jaxgpt.data.prepared.index import read_index
from jaxgpt.data.text import read_path
from jaxgpt.directories import output_kind
from jaxgpt.errors import UserError
from jaxgpt.listing import list_files
from jaxgpt.record_files import holds_records

NOBODY = 65534  # user id of a user without privileges
CLOSED = Path("texts/closed")
RUN = Path("run")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """A run and a directory of texts, and a function that takes the permissions of a path from this process."""
    before = os.geteuid()
    changed = list[tuple[Path, int]]()

    def close(path: Path) -> None:
        changed.append((path, path.stat().st_mode))
        path.chmod(0)
        if before == 0:
            os.seteuid(NOBODY)  # permissions do not bind root

    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        monkeypatch.chdir(directory)
        run_folder(RUN, SMALL)
        CLOSED.mkdir(parents=True)
        Path("texts/a.txt").write_text("one")
        yield close
        os.seteuid(before)
        for path, mode in changed:
            path.chmod(mode)
        monkeypatch.undo()


@pytest.mark.parametrize("read", [list_files, output_kind, read_path])
def test_a_directory_of_data_that_cannot_be_read_is_named(
    read: Callable[[Path], Any], closed: Callable[[Path], None]
) -> None:
    closed(CLOSED)
    with pytest.raises(UserError, match="cannot read texts/closed: Permission denied"):
        read(CLOSED)
    if read is not output_kind:
        with pytest.raises(UserError, match="cannot read texts/closed: Permission denied"):
            read(Path("texts"))


def test_a_directory_that_cannot_be_read_is_neither_records_nor_prepared(closed: Callable[[Path], None]) -> None:
    closed(CLOSED)
    assert not holds_records(CLOSED)
    assert read_index(CLOSED) is None


@pytest.mark.parametrize("read", [open_run, lambda path: check_free(path, overwrite=True)])
def test_a_run_that_cannot_be_read_is_named(read: Callable[[Path], Any], closed: Callable[[Path], None]) -> None:
    closed(RUN)
    with pytest.raises(UserError, match=r"cannot read run: Permission denied"):
        read(RUN)


def test_checkpoints_that_cannot_be_listed_are_not_missing(closed: Callable[[Path], None]) -> None:
    """Otherwise, a resume would start again from step 0."""
    closed(RUN / "checkpoints")
    with pytest.raises(UserError, match="cannot read run/checkpoints: Permission denied"):
        saved_steps(RUN / "checkpoints")


@pytest.mark.parametrize("name", [SEAL, "params/manifest.ocdbt"])
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(name: str, closed: Callable[[Path], None]) -> None:
    """Otherwise, a resume would rename it, and continue from an earlier checkpoint."""
    file = RUN / "checkpoints" / "0" / name
    closed(file)
    with pytest.raises(UserError, match=f"cannot read {file}: Permission denied"):
        latest_valid(RUN / "checkpoints", pytest.fail)
    assert saved_steps(RUN / "checkpoints") == [0]


@pytest.mark.parametrize("read", [open_run, lambda path: check_free(path, overwrite=False)])
def test_a_link_to_a_missing_directory_is_named(read: Callable[[Path], Any]) -> None:
    Path("link").symlink_to("nowhere")
    with pytest.raises(UserError, match="link is a link to a missing file or directory: nowhere"):
        read(Path("link"))
