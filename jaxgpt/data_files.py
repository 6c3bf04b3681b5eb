"""Files of the data in the settings of a run: where they are, and what they hold. The functions read the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxgpt.config import Config
from jaxgpt.data_settings import FROM_TEXT, NAMED_TOKENIZERS, DataConfig
from jaxgpt.files import missing
from jaxgpt.record_files import holds_records


def place_of(path: str, directory: str) -> str:
    """Return the path of data in `directory`, where the run was started; if missing there, the path itself."""
    started = Path(directory, path)
    if path and _is_elsewhere(directory) and started.exists():
        return str(started)
    return path


def _is_elsewhere(directory: str) -> bool:
    """Return whether the directory where a run was started is not the current directory; "": the current directory."""
    return Path(directory).resolve() != Path.cwd()


def located(data: DataConfig, directory: str) -> DataConfig:
    """Return the settings of a source with the path at which its data are found.

    Relative paths refer to `directory`, where the run was started; if the data are not there, to the current directory.

    Raises:
        UserError: if the data are in neither place.
    """
    if not data.path:
        return data
    found = place_of(data.path, directory)
    if Path(found).exists():
        return replace(data, path=found)
    has_one_place = not _is_elsewhere(directory) or Path(data.path).is_absolute()
    if has_one_place:
        raise missing(data.path)
    fix = "pass the new place with --data.path or --data.mix, or run the command where the run was started"
    raise missing(data.path, f", neither in {directory}, where the run was started, nor in {Path.cwd()}: {fix}")


def tokenizer_place(config: Config) -> str:
    """Return `data.tokenizer`: a name, or the path at which the file is found, like the paths of data (`located`)."""
    kind = config.data.tokenizer
    return kind if kind in NAMED_TOKENIZERS else place_of(kind, config.directory)


def base_directory(config: Config) -> str:
    """Return the base of relative data paths: where the run was started, or the current directory if only it has the data."""
    here = str(Path.cwd())
    paths = [each.path for each in config.data.sources]
    for directory in (config.directory or here, here):
        if all(Path(directory, path).exists() for path in paths):
            return directory
    return config.directory or here


def holds_conversations(source: DataConfig) -> bool:
    """Return whether a source is read as records, such as conversations: a file of records, or a directory of such files."""
    path = Path(source.path)
    if source.tokenizer in FROM_TEXT and (path.is_dir() or path.suffix.lower() == ".json"):
        return False  # read as text, because the tokenizer is built from text
    return bool(source.path) and holds_records(path)


def has_documents(config: Config) -> bool:
    """Return whether the windows of a run have document ids; windows of conversations always have them."""
    if config.data.documents != "flow":
        return True
    for source in config.data.sources:
        found = replace(source, path=place_of(source.path, config.directory))
        if holds_conversations(found):
            return True
    return False
