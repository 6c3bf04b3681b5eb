"""Notes of jaxgpt on exceptions (PEP 678), distinguished from the notes of other libraries, such as JAX."""

from __future__ import annotations

_PREFIX = "jaxgpt: "


def add_own_note(error: BaseException, text: str) -> None:
    """Add a note of jaxgpt to an error that is raised unchanged, such as an error in the user's own code."""
    error.add_note(f"{_PREFIX}{text}")


def own_notes(error: BaseException) -> list[str]:
    """Return the notes of `add_own_note`, without the notes of other libraries, such as JAX."""
    notes = getattr(error, "__notes__", [])  # absent without notes (PEP 678)
    return [note.removeprefix(_PREFIX) for note in notes if note.startswith(_PREFIX)]
