"""Drafts of exported directories and files: written next to the target, and renamed to it on success."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxgpt.atomic import TEMPORARY, check_renames
from jaxgpt.convert.files import is_gguf
from jaxgpt.errors import UserError, reported
from jaxgpt.locks import sole_writer

OF_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx")  # suffixes of files of weights


def check_new(target: Path) -> None:
    """Raise `UserError` if a path exists, unless it is an empty directory."""
    is_empty_directory = target.is_dir() and not any(target.iterdir())
    if not is_empty_directory:
        _check_missing(target)


def _check_missing(target: Path) -> None:
    """Raise `UserError` if a path exists."""
    if target.exists():
        raise UserError(f"{target} already exists: choose a different name, or remove it")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a draft directory, which is renamed to `target` on success and deleted on failure.

    A killed process leaves its draft next to `target`; the next process with this target deletes it. Raises `UserError`
    if `target` exists (except as an empty directory), cannot be written or replaced, or has the name of a file of weights.
    """
    if is_gguf(target):
        raise UserError(f"{target} has the name of a GGUF file: choose a different name for a directory")
    if target.suffix.lower() in OF_FILES:
        raise UserError(
            f"{target} ends in {target.suffix}, but an export is a directory: choose a name without this suffix, or one "
            f"that ends in .gguf for a GGUF file"
        )
    check_new(target)
    if target.exists() and (target.samefile(Path()) or target.is_mount()):
        raise UserError(f"{target} is the current directory or a mount point: choose a new directory in it")
    with _draft(target, "new") as draft:
        with reported(f"cannot write {target}"):
            shutil.rmtree(draft, ignore_errors=True)
            check_renames(draft.parent, target)
            draft.mkdir()
        yield draft


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield the path of a draft file, as `new_directory` does for a directory."""
    _check_missing(target)
    with _draft(target, f"new{target.suffix}") as draft:
        yield draft


@contextmanager
def _draft(target: Path, name: str) -> Iterator[Path]:
    """Yield a path in a locked directory next to `target`, and rename it to `target` on success."""
    target = target.resolve()
    temporary = target.with_name(f".{target.name}{TEMPORARY}")
    with reported(f"cannot write {target}"):
        temporary.mkdir(parents=True, exist_ok=True)
    with sole_writer(temporary):
        draft = temporary / name
        try:
            yield draft
            with reported(f"cannot write {target}"):
                draft.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
