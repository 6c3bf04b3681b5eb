"""Files of a stranger: refused before memory is taken, in one line, with exit code 2; and nothing runs what it reads."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import LLAMA, SMALL, hf_folder, nanogpt_folder, run_folder
from helpers import MODELS, TEXT, jaxgpt, repository, small

from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig, UserError, from_json
from jaxgpt.convert import llama
from jaxgpt.convert.files import Weights, read_arrays, text_beside
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensors import leaf_shapes
from jaxgpt.convert.weights import check_weights
from jaxgpt.data import load_dataset
from jaxgpt.data.tokenizer import load_tokenizer, make_tokenizer
from jaxgpt.data.tokens import Tokens, open_tokens
from jaxgpt.presets import PRESETS, preset
from jaxgpt.strict import parse_json, read_bytes, read_json
from jaxgpt.train.metrics import read_metrics
from jaxgpt.train.plot import plot_losses

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
def test_nothing_runs_what_it_reads(path: Path) -> None:
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
                assert {k.arg: ast.literal_eval(k.value) for k in node.keywords} == {"allow_pickle": False}
            if name == "importlib.import_module":
                assert ast.unparse(node.args[0]).startswith(("f'jaxgpt.cli.", "'jaxgpt.", "_HOME[")), (
                    "names of our own alone"
                )


class Bomb:
    """A pickle that writes a file when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("it-ran",)


def pickled() -> bytes:
    return pickle.dumps(Bomb())


def torch_zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled())
    return out.getvalue()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "ckpt.pth", "weights.pkl"])
@pytest.mark.parametrize("content", [pickled, torch_zip])
def test_a_pickle_is_named_and_never_opened(name: str, content: Any, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content())
    result = jaxgpt("import", str(folder), "run")
    assert (result.code, result.out) == (2, "")
    assert f"{name} is a pickle, which can run code" in result.err
    # Under the name of something else it is not that either.
    (folder / "model.safetensors").write_bytes(content())
    assert jaxgpt("import", str(folder), "run").code == 2
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("start", [torch_zip(), bytes.fromhex("80028a0a6cfc9c46f920") + b"\0" * 100])
def test_a_file_of_torch_is_no_row_of_ids(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(start + b"\0" * (len(start) % 2))
    with pytest.raises(UserError, match="a file of torch's"):
        open_tokens(tmp_path / "train.bin")


JSON = {
    "key twice": (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
    "nan": (b'{"a": NaN}', "NaN is not JSON"),
    "infinity": (b'{"a": -Infinity}', "-Infinity is not JSON"),
    "large": (b'{"a": 1e400}', "'1e400' is beyond float64"),
    "long": (b'{"a": 1' + b"0" * 5000 + b"}", "beyond 64 bits"),
    "65 bits": (b'{"a": 18446744073709551616}', "beyond 64 bits"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "mark": (b"\xef\xbb\xbf{}", "BOM"),
    "bytes": (b'{"a": "\xff"}', "can't decode byte 0xff"),
    "half": (b'{"a": "\\ud800"}', "surrogates not allowed"),
    "cut": (b'{"a": ', "Expecting value"),
    "two": (b"{} {}", "Extra data"),
}


@pytest.mark.parametrize("case", JSON)
def test_json_that_readers_disagree_on(case: str) -> None:
    text, message = JSON[case]
    with pytest.raises(UserError, match=message) as error:
        parse_json(text, "config.json")
    assert str(error.value).startswith("config.json: not valid JSON (")
    assert len(str(error.value).splitlines()) == 1


def test_json_of_64_bits_and_pairs_is_fine() -> None:
    value = {"a": [2**64 - 1, -(2**63), 1.7e308, "\U0001f600"]}
    assert parse_json(json.dumps(value), "x") == value


def test_only_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="it is no file"):
        read_json(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as f:
        f.truncate(2**40)
    with pytest.raises(UserError, match=r"1,099,511,627,776 bytes, at most 16,777,216 are read"):
        read_bytes(tmp_path / "large")


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    assert str(UserError("no file a\nb\r\x1b[31m\u2028\udc80: give another")) == (
        "no file a\\nb\\r\\x1b[31m\\u2028\\udc80: give another"
    )
    assert len(str(UserError("x" * 10**6))) < 1010
    assert jaxgpt("info", "a\nb").err.count("\n") == 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_counted_before_there_are_any(name: str, bias: bool) -> None:
    config = small(name, bias=bias)
    assert config.parameters == sum(int(np.prod(shape)) for shape in leaf_shapes(config).values())


def test_all_presets_are_allowed() -> None:
    assert max(preset(name).model.parameters for name in PRESETS) < 10**10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_layer": 10**12}, "model.n_layer must be at least 1 and at most 1024, not 1000000000000"),
        ({"n_layer": 10**400}, "model.n_layer must be"),
        ({"dropout": 10**400}, "model.dropout must be at least 0 and below 1"),
        ({"n_embd": 2**24}, "13.5 PB|parameters, .* TB in float32"),
        ({"vocab_size": 2**31}, "model.vocab_size must be at least 0 and at most"),
        ({"n_inner": 2**31 - 1, "n_embd": 2**16}, "TB in float32"),
        ({"n_head": 4, "head_dim": 2**31 - 1, "n_embd": 2**12}, "TB in float32"),
        ({"block_size": 2**24, "n_embd": 2**20}, "TB in float32"),
    ],
)
def test_a_model_that_no_memory_holds(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig(**settings)  # type: ignore[arg-type]


def test_a_batch_that_no_memory_holds() -> None:
    with pytest.raises(UserError, match=r"are 137,438,953,472 ids: at most 268,435,456 are put into an update"):
        Config(model=ModelConfig(block_size=255), train=TrainConfig(batch_size=2**29))


@pytest.mark.parametrize("value", ["a\0b", "\udcff"])
def test_a_path_that_no_file_has(value: str) -> None:
    with pytest.raises(UserError, match=r"data\.path .* holds what is no character"):
        DataConfig(path=value)


def test_a_deep_value_of_a_setting_is_named_shortly() -> None:
    with pytest.raises(UserError, match=r"model\.n_layer must be of type int") as error:
        from_json('{"model": {"n_layer": ' + "[" * 500 + "]" * 500 + "}}")
    assert len(str(error.value)) < 200


LIES = {
    "beyond the file": ({"data_offsets": [0, 10**15]}, "cut off or no safetensors"),
    "negative": ({"data_offsets": [-4, 20]}, "cut off or no safetensors"),
    "backwards": ({"data_offsets": [20, 0]}, "cut off or no safetensors"),
    "a hole": ({"data_offsets": [4, 24]}, "cut off or no safetensors"),
    "type": ({"dtype": "F1024"}, "cut off or no safetensors"),
    "overflow": ({"shape": [2**40, 2**40]}, "cut off or no safetensors"),
    "shape": ({"shape": [10**12]}, "cut off or no safetensors"),
    "negative shape": ({"shape": [-5]}, "cut off or no safetensors"),
    "float shape": ({"shape": [5.0]}, "cut off or no safetensors"),
}


def lying(header: dict[str, Any], length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * 20


@pytest.mark.parametrize("case", LIES)
def test_a_header_that_lies(case: str, tmp_path: Path) -> None:
    said, message = LIES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(lying({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]} | said}))
    with pytest.raises(UserError, match=message):
        Weights(path)


def test_overlapping_tensors_and_a_header_without_end(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}
    for data in (lying({"x": entry, "y": entry}), lying({"x": entry}, 2**62), lying({"x": entry}, 10**8), b"\xff" * 8):
        path.write_bytes(data)
        with pytest.raises(UserError, match="cut off or no safetensors file"):
            Weights(path)


def test_a_link_may_not_lead_elsewhere(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret.safetensors", hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").rename(secret)
    (folder / "model.safetensors").symlink_to(secret)
    result = jaxgpt("import", str(folder), "run")
    assert result.code == 2
    assert "is a link to" in result.err
    assert "outside of its folder" in result.err


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x", "", "a\0", "..\\..\\x", "x" * 300])
def test_a_recipe_names_no_text_elsewhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither in its folder nor beside it"):
        text_beside(tmp_path / "recording", name)
    folder, _ = nanogpt_folder(tmp_path / "nano")
    recipe = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(recipe | {"text": name}))
    assert jaxgpt("import", str(folder), "run").code == 2


def test_a_config_that_claims_more_than_the_files_hold(tmp_path: Path) -> None:
    """Also where the tokenizer would have as many words as the model claims ids."""
    folder = hf_folder(tmp_path / "hf")
    for claim in ({"n_layer": 1000}, {"vocab_size": 2**24}, {"n_embd": 2**16}, {"n_layer": 10**12}):
        config = json.loads((folder / "config.json").read_text()) | claim
        (tmp_path / "claims.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=r"no tensor of layer|has the shape|at most 1024"):
            check_weights(Weights(folder), _described(config), _gpt2_form())


def _described(config: dict[str, Any]) -> ModelConfig:
    from jaxgpt.convert import gpt2

    return gpt2.config_from_hf(Options(config, "config.json"))


def _gpt2_form() -> Any:
    from jaxgpt.convert.models import GPT2

    return GPT2


QWEN = llama.config_to_hf(replace(LLAMA, qk_norm=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**12, "layer_types": None}, "model.n_layer must be"),
        ({"num_hidden_layers": 10**12}, "layer_types"),
        ({"head_dim": 2**30}, r"model\.head_dim must be .* at most 65536"),
        ({"layer_types": 5}, "layer_types 5 .* must be a list"),
        ({"use_sliding_window": True, "sliding_window": "4"}, "whole numbers"),
        ({"rope_parameters": "default"}, "rope_parameters 'default' .* must be an object"),
        ({"rope_parameters": [1, 2]}, "rope_parameters .* must be an object"),
    ],
)
def test_layers_are_counted_not_spelled_out(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llama.config_from_hf(Options(QWEN | values, "config.json"), qwen3=True)


def test_a_model_type_of_any_kind(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    (folder / "config.json").write_text('{"model_type": ["gpt2"]}')
    assert "model_type ['gpt2'] is not computed here" in jaxgpt("import", str(folder), "run").err


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def npy(shape: tuple[int, ...], dtype: str, data: bytes) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue() + data


def test_arrays_as_numpy_writes_them(tmp_path: Path) -> None:
    a, b = np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(3, 2))
    np.savez_compressed(tmp_path / "x.npz", a=a, b=b)
    got = read_arrays(tmp_path / "x.npz", "a", "b")
    assert [x.tolist() for x in got] == [a.tolist(), b.tolist()]


ARRAYS = {
    "object": npy((1,), "|O", pickled()),
    "float": npy((1,), "<f8", b"\0" * 8),
    "larger than it is": npy((10**12,), "<i8", b"\0" * 8),
    "smaller than it is": npy((1,), "<i8", b"\0" * 80),
    "no array": b"\x80\x04x",
    "code for a header": b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').mkdir('it-ran')",
}


@pytest.mark.parametrize("case", ARRAYS)
def test_an_archive_that_lies(case: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no a that can be read"):
        read_arrays(npz(tmp_path / "x.npz", a=ARRAYS[case]), "a")
    assert not (tmp_path / "it-ran").exists()


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    ids = np.arange(5000, dtype="<u4") % 256
    ids[4000] = 2**31 + 5
    head = np.array([20240801, 7, len(ids)] + [0] * 253, "<i4").tobytes()
    (tmp_path / "train.bin").write_bytes(head + ids.tobytes())
    config = Config(model=SMALL, data=DataConfig(path="train.bin", tokenizer="byte"))
    with pytest.raises(UserError, match=r"train\.bin: id 2147483653 is beyond the vocabulary of 300"):
        load_dataset(config)
    with pytest.raises(UserError, match="id 300 is beyond"):  # past what is looked at when files are opened
        Tokens([np.array([299, 300, 1])], 300).take(1, 2)
    with pytest.raises(UserError, match="id -1 is beyond"):
        Tokens([np.array([299, -1, 1])]).take(0, 2)


CHAR = json.loads(make_tokenizer("char", "abc", 0, 0).to_json())
BYTES = json.loads(make_tokenizer("byte", "", 0, 0).to_json())


def changed(base: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return base | {k: v for k, v in parts.items() if k != "model"} | {"model": base["model"] | parts.get("model", {})}


def pattern(text: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}


TOKENIZERS = {
    "explodes": (changed(BYTES, pre_tokenizer=pattern("(a+)+$")), "repeats a group"),
    "explodes by name": (changed(BYTES, pre_tokenizer=pattern(r"(?<x>a|aa){0}\g<x>+$")), "repeats a group"),
    "explodes in a normalizer": (
        changed(BYTES, normalizer={"type": "Replace", "pattern": {"Regex": "(a|aa){1,99}$"}, "content": ""}),
        "repeats a group",
    ),
    "order": (changed(CHAR, model={"vocab": {"b": 0, "a": 1}}), "order of their code points"),
    "holes": (changed(CHAR, model={"vocab": {"a": 0, "b": 2}}), "ids are not 0, 1, 2"),
    "one id twice": (changed(CHAR, model={"vocab": {"a": 0, "b": 0}}), "two of its words have the same id"),
    "no ids": (changed(CHAR, model={"vocab": {}}), "it has no words"),
    "a far id": (changed(BYTES, model={"vocab": {"a": 2**32 - 1}}), "id 4294967295 is not below 16777216"),
    "true for an id": (changed(CHAR, model={"vocab": {"a": False, "b": True}}), "cannot read this file"),
    "a list": ([], "no model with a vocabulary"),
    "of another type": ({"model": 5}, "no model with a vocabulary"),
    "merges of nothing": (changed(BYTES, model={"merges": [["xyz", "q"]]}), "cannot read this file"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_would_hang_or_lie(case: str, tmp_path: Path) -> None:
    value, message = TOKENIZERS[case]
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_patterns_of_published_models_are_read(tmp_path: Path) -> None:
    """Brackets within a class of characters are no group: DeepSeek's and GPT-4o's patterns have such."""
    for text in (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|\s+",
        r"[^\r\n\p{L}]?\p{Lu}*\p{Ll}+(?i:'s|'t)?|\p{N}{1,3}",
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed(BYTES, pre_tokenizer=pattern(text))))
        assert load_tokenizer(tmp_path).vocab_size == 256


def test_ids_with_holes_are_below_the_vocabulary_size(tmp_path: Path) -> None:
    vocab = BYTES["model"]["vocab"] | {"zz": 999}
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(BYTES, model={"vocab": vocab})))
    assert load_tokenizer(tmp_path).vocab_size == 1000


def test_a_text_has_one_row_of_ids(tmp_path: Path) -> None:
    """Dropout of merges, and pieces cut where an unknown pattern finds other words, would give it several."""
    base = json.loads(make_tokenizer("bpe", TEXT, 300, 0).to_json())
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(base, model={"dropout": 0.5})))
    plain = make_tokenizer("bpe", TEXT, 300, 0).encode(TEXT).tolist()
    assert load_tokenizer(tmp_path).encode(TEXT).tolist() == plain
    hundreds = changed(
        base, pre_tokenizer={"type": "Sequence", "pretokenizers": [pattern(r"[\s\S]{7}"), BYTES["pre_tokenizer"]]}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(hundreds))
    tokenizer: Any = load_tokenizer(tmp_path)
    long = TEXT * 8
    assert tokenizer.encode(long).tolist() == tokenizer._tokenizer.encode(long).ids


def test_metrics_of_every_wrong_kind(tmp_path: Path) -> None:
    lines = [b'{"step": 1, "loss": 2.0}', b'{"step": true, "loss": 1.0}', b'{"step": -1}', b'{"step": 2, "loss": NaN}']
    lines += [
        b"[" * 5000,
        b"\xff\xfe",
        b'{"step": 3, "step": 4}',
        b"null",
        b'{"step": 5, "loss": "low", "val_loss": 3}',
    ]
    lines += [b'{"step": 6, "loss": 1e400}', b'{"step": 99999999999999999999}', b'{"step": 7, "lo']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 5]
    plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "runs/$a^$b_")
    assert (tmp_path / "loss.png").stat().st_size > 1000


LITTLE_MEMORY = """
import resource, sys
from jaxgpt.cli import main
import jaxgpt.lm, jaxgpt.convert.models, jaxgpt.convert.replay, jaxgpt.cli.sample
cases = sys.stdin.read().splitlines()
main(cases[0].split("\\t"))  # what a first command makes once is not counted
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for case in cases:
    print(main(case.split("\\t")), flush=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_nothing_large_is_made_of_a_claim(tmp_path: Path) -> None:
    """Files that claim terabytes: each command ends with 2 and one line, and all of them take less than 100 MB."""
    cases = []
    for name, claim in {
        "layers": {"n_layer": 1024},
        "width": {"n_embd": 2**16},
        "vocab": {"vocab_size": 2**24},
    }.items():
        folder = hf_folder(tmp_path / f"hf-{name}")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | claim))
        cases.append(["import", str(folder), f"run-{name}", "--tokenizer", "ids"])
    for name, claim in {
        "width": {"n_embd": 2**16},
        "vocab": {"vocab_size": 2**24},
        "block": {"block_size": 2**24},
    }.items():
        run = run_folder(tmp_path / f"run-of-{name}", SMALL)
        saved = json.loads((run / "config.json").read_text())
        saved["model"] |= claim
        (run / "config.json").write_text(json.dumps(saved))
        cases.append(["sample", str(run), "--prompt", "To"])
    recording, _ = nanogpt_folder(tmp_path / "bomb")
    npz(recording / "offsets.npz", split=npy((2**26,), "<i8", b"\0" * 2**29), ix=npy((2**26,), "<i8", b"\0" * 2**29))
    cases.append(["replay", str(recording)])
    for name in ("config.json", "tokenizer.json"):
        run = run_folder(tmp_path / f"large-{name}", SMALL)
        with (run / name).open("r+b") as f:
            f.truncate(2**38)
        cases.append(["sample", str(run), "--prompt", "To"])
    result = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY],
        input="\n".join(map("\t".join, cases)),
        capture_output=True,
        text=True,
        check=True,
    )
    *codes, megabytes = map(int, result.stdout.split())
    assert codes == [2] * len(cases), result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("jaxgpt: ")]
    assert len(lines) == len(cases) + 1, result.stderr
    assert megabytes < 100
