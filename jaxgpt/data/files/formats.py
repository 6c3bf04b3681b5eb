"""Formats of data files: suffixes, and formats that need a conversion or a package."""

from __future__ import annotations

from pathlib import Path

from jaxgpt.errors import UserError

LINES = (".jsonl", ".ndjson")  # suffixes of JSON Lines
# Formats with structure that becomes part of the text.
STRUCTURED = {".csv": "CSV", ".tsv": "TSV", ".html": "HTML", ".htm": "HTML", ".xml": "XML"}
NUMPY = b"\x93NUMPY"  # first bytes of a .npy file


class MissingPackage(UserError):
    """The error for a format whose library is not installed."""


def check_no_arrow(path: Path) -> None:
    """Raise `UserError` for a file of `datasets.save_to_disk`: the JSON files next to it are not the text of the data set."""
    if path.suffix.lower() == ".arrow":
        raise UserError(
            f"{path} is an Arrow file of the package datasets: write the data set as Parquet, for example with "
            f"datasets.load_from_disk({str(path.parent)!r}).to_parquet('train.parquet')"
        )


def how_to_convert_npy(path: Path) -> str:
    """Return the advice to write the ids of a NumPy file as a token file."""
    return f"write its ids with numpy.load({path.name!r}).astype('uint16').tofile('train.bin')"
