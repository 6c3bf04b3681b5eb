"""Files of the data in the settings of a run: where they are, and what they hold. The functions read the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxgpt.config import Config
from jaxgpt.data_settings import FROM_TEXT, DataConfig
from jaxgpt.listing import holds_records


def place_of(path: str, directory: str) -> str:
    """Return the path of data in `directory`, where the run was started; if missing there, the path itself."""
    started = Path(directory, path)
    is_elsewhere = Path(directory).resolve() != Path.cwd()
    if path and is_elsewhere and started.exists():
        return str(started)
    return path


def holds_conversations(source: DataConfig) -> bool:
    """Return whether the path of a source is a file of records, such as conversations, or a directory of such files."""
    path = Path(source.path)
    if source.tokenizer in FROM_TEXT and (path.is_dir() or path.suffix.lower() == ".json"):
        return False  # the tokenizer is built from their text
    return bool(source.path) and holds_records(path)


def has_documents(config: Config) -> bool:
    """Return whether the windows of a run have document ids, as windows of conversations always have."""
    if config.data.documents != "flow":
        return True
    for source in config.data.sources:
        found = replace(source, path=place_of(source.path, config.directory))
        if holds_conversations(found):
            return True
    return False
