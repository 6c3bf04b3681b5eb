"""Forged files for several tests."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np


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


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def npy(shape: tuple[int, ...], dtype: str, data: bytes) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue() + data
