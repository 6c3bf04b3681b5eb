"""Forged files for several tests."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import Any


class Bomb:
    """An object whose pickle writes a file when loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("it-ran",)


def pickled() -> bytes:
    return pickle.dumps(Bomb())


def torch_zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled())
    return out.getvalue()
