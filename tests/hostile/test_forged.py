"""Forged files: headers, links, pickles, and ids outside the vocabulary. No code runs what it reads."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from folders import hf_folder
from helpers import jaxgpt, nodes, repository

from jaxgpt.convert.files import open_safetensors
from jaxgpt.errors import UserError

ENTRY = {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}
LIES: list[dict[str, Any]] = [
    {"data_offsets": [0, 10**15]},
    {"data_offsets": [-4, 20]},
    {"data_offsets": [20, 0]},
    {"data_offsets": [4, 24]},
    {"dtype": "F1024"},
    {"shape": [2**40, 2**40]},
    {"shape": [-5]},
    {"shape": [5.0]},
]


def forged(header: dict[str, Any], length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * 20


def test_forged_headers(tmp_path: Path) -> None:
    files = [forged({"x": ENTRY | lie}) for lie in LIES]
    files += [forged({"x": ENTRY, "y": ENTRY}), forged({"x": ENTRY}, 2**62), forged({"x": ENTRY}, 10**8), b"\xff" * 8]
    for data in files:
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(UserError, match="truncated or not a safetensors file"):
            open_safetensors(tmp_path / "model.safetensors")


FILES = sorted((repository() / "jaxgpt").rglob("*.py"))
UNSAFE_MODULES = set("pickle cPickle _pickle dill cloudpickle marshal shelve joblib code".split())
# YAML may only be parsed to nodes, which hold text: its loaders construct Python objects.
YAML_NODES = {"compose", "CSafeLoader", "SafeLoader", "__with_libyaml__", "YAMLError", "MappingNode", "ScalarNode"}
# lm-evaluation-harness' manager of tasks runs functions named by a task, as docs/evaluate.md warns.
LOADERS = ("json.loads", "ocp.load", "np.load", "manager.load")
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}


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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(repository())))
def test_no_code_runs_what_it_reads(path: Path) -> None:
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & UNSAFE_MODULES
            assert all(
                alias.name == "yaml" and not alias.asname for alias in node.names if alias.name.startswith("yaml")
            )
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in {"yaml", *UNSAFE_MODULES}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml":
            assert node.attr in YAML_NODES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in UNSAFE_CALLS
            assert not name.endswith((".loads", ".load")) or name in LOADERS, name
            if name in ("np.load", "numpy.load"):
                assert ("allow_pickle", False) in {(k.arg, ast.literal_eval(k.value)) for k in node.keywords}
            if name == "importlib.import_module":
                assert ast.unparse(node.args[0]).startswith(("f'jaxgpt.cli.", "'jaxgpt.", "_HOME[")), (
                    "only our own names"
                )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "ckpt.pth", "weights.pkl"])
@pytest.mark.parametrize("content", [pickled, torch_zip])
def test_pickles_raise_without_being_opened(name: str, content: Any, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content())
    result = jaxgpt("import", str(folder), "run")
    assert (result.code, result.out) == (2, "")
    assert f"{name} is a pickle, which can run code" in result.err
    # The same with the suffix of a different file type.
    (folder / "model.safetensors").write_bytes(content())
    assert jaxgpt("import", str(folder), "run").code == 2
    assert not (tmp_path / "it-ran").exists()
