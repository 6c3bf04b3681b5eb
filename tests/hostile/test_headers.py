"""Forged headers, links and archives; ids outside the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import SMALL, hf_folder
from helpers import jaxgpt

from jaxgpt.config import Config, DataConfig, UserError
from jaxgpt.convert.files import Weights
from jaxgpt.data import open_data
from jaxgpt.data.tokens import Tokens

LIES = {
    "beyond the file": ({"data_offsets": [0, 10**15]}, "truncated or not a safetensors"),
    "negative": ({"data_offsets": [-4, 20]}, "truncated or not a safetensors"),
    "backwards": ({"data_offsets": [20, 0]}, "truncated or not a safetensors"),
    "a hole": ({"data_offsets": [4, 24]}, "truncated or not a safetensors"),
    "type": ({"dtype": "F1024"}, "truncated or not a safetensors"),
    "overflow": ({"shape": [2**40, 2**40]}, "truncated or not a safetensors"),
    "shape": ({"shape": [10**12]}, "truncated or not a safetensors"),
    "negative shape": ({"shape": [-5]}, "truncated or not a safetensors"),
    "float shape": ({"shape": [5.0]}, "truncated or not a safetensors"),
}


def lying(header: dict[str, Any], length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * 20


@pytest.mark.parametrize("case", LIES)
def test_forged_headers(case: str, tmp_path: Path) -> None:
    said, message = LIES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(lying({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]} | said}))
    with pytest.raises(UserError, match=message):
        Weights(path)


def test_overlapping_tensors_and_an_endless_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}
    for data in (lying({"x": entry, "y": entry}), lying({"x": entry}, 2**62), lying({"x": entry}, 10**8), b"\xff" * 8):
        path.write_bytes(data)
        with pytest.raises(UserError, match="truncated or not a safetensors file"):
            Weights(path)


def test_links_out_of_the_folder_raise(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret.safetensors", hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").rename(secret)
    (folder / "model.safetensors").symlink_to(secret)
    result = jaxgpt("import", str(folder), "run")
    assert result.code == 2
    assert "is a link to" in result.err
    assert "outside its folder" in result.err


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    ids = np.arange(5000, dtype="<u4") % 256
    ids[4000] = 2**31 + 5
    head = np.array([20240801, 7, len(ids)] + [0] * 253, "<i4").tobytes()
    (tmp_path / "train.bin").write_bytes(head + ids.tobytes())
    config = Config(model=SMALL, data=DataConfig(path="train.bin", tokenizer="byte"))
    with pytest.raises(UserError, match=r"train\.bin: id 2147483653 is outside the vocabulary of 300"):
        open_data(config)
    with pytest.raises(UserError, match="id 300 is outside"):  # after the part that is checked when files are opened
        Tokens([np.array([299, 300, 1])], 300).take(1, 2)
    with pytest.raises(UserError, match="id -1 is outside"):
        Tokens([np.array([299, -1, 1])]).take(0, 2)
