"""No code runs what it reads: there is no pickle in the code, and pickle files raise without being opened."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from folders import hf_folder
from forged import pickled, torch_zip
from helpers import jaxgpt, repository

from jaxgpt.config import UserError
from jaxgpt.data.tokens import open_tokens

FILES = sorted((repository() / "jaxgpt").rglob("*.py"))
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "yaml",
    "code",
}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(repository())))
def test_no_code_runs_what_it_reads(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in UNSAFE_MODULES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in UNSAFE_CALLS
            assert not name.endswith((".loads", ".load")) or name in ("json.loads", "ocp.load", "np.load"), name
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
    # The same under the name of another file type.
    (folder / "model.safetensors").write_bytes(content())
    assert jaxgpt("import", str(folder), "run").code == 2
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("start", [torch_zip(), bytes.fromhex("80028a0a6cfc9c46f920") + b"\0" * 100])
def test_a_torch_file_is_not_a_token_file(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(start + b"\0" * (len(start) % 2))
    with pytest.raises(UserError, match="a PyTorch file"):
        open_tokens(tmp_path / "train.bin")
