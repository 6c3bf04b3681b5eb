"""Fuzz targets: every input must raise a one-line `UserError` that names the file or setting, or give a correct result.

Each target takes the bytes of an input and returns whether it was accepted; other exceptions are not caught.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from folders import OF_FAMILIES, SMALL, hf_folder, run_folder
from helpers import parsed
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.store import SEAL, latest_valid, read_info, seal
from jaxgpt.cli.parse import COMMANDS
from jaxgpt.cli.plot import draw_run
from jaxgpt.cli.settings import with_settings
from jaxgpt.config import Config, ModelConfig, from_json, to_json
from jaxgpt.convert.family import Family
from jaxgpt.convert.files import Weights
from jaxgpt.convert.models import FAMILIES, open_model
from jaxgpt.convert.weights import check_weights
from jaxgpt.data.chat_template import ChatTemplate
from jaxgpt.data.conversations import read_conversations
from jaxgpt.data.tokenizer import ByteTokenizer, SubwordTokenizer
from jaxgpt.data.tokenizer_files import load_tokenizer
from jaxgpt.data.tokens import open_tokens
from jaxgpt.errors import UserError
from jaxgpt.lm import load
from jaxgpt.presets import preset
from jaxgpt.trainer.metrics import read_metrics

SECONDS = 5.0  # CPU seconds per input
PROBES = ("", "a", "the cat  sat\n on 12 mats", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", "\u00e9\u4e2d\U0001f600")


def outcome(target: Callable[[bytes], None], data: bytes) -> bool:
    """Run a target and return whether the input was accepted."""
    began = time.process_time()
    try:
        target(data)
        accepted = True
    except UserError as e:
        accepted = False
        assert len(str(e).splitlines()) == 1, f"not one line: {str(e)!r}"
        assert 10 < len(str(e)) <= 1100
    assert time.process_time() - began < SECONDS
    return accepted


def config(data: bytes) -> None:
    """config.json of a run: round-trips, and every value has the declared type."""
    found = from_json(data)
    assert from_json(to_json(found)) == found
    assert isinstance(found, Config)
    for name, said in json.loads(data).items():
        section = getattr(found, name)
        values = [(getattr(section, key), said[key]) for key in said] if isinstance(said, dict) else [(section, said)]
        for mine, value in values:
            mine = list(mine) if isinstance(mine, tuple) else mine  # JSON has lists
            assert mine == value
            assert isinstance(mine, float) or type(mine) is type(value)


def tokenizer(data: bytes) -> None:
    """tokenizer.json: ids are below vocab_size, deterministic, and the same after saving and loading."""
    path = Path("tokenizer.json")
    path.write_bytes(data)
    one = load_tokenizer(path)
    path.write_text(one.to_json(), "utf-8")
    two = load_tokenizer(path)
    assert (one.vocab_size, one.eos_id, type(one)) == (two.vocab_size, two.eos_id, type(two))
    vocab = json.loads(data)["model"]["vocab"]
    for text in PROBES:
        try:
            ids = one.encode(text)
        except UserError:
            continue
        assert ids.dtype == np.int32
        assert ((ids >= 0) & (ids < one.vocab_size)).all()
        assert ids.tolist() == one.encode(text).tolist() == two.encode(text).tolist()
        assert one.decode(ids) == two.decode(ids)
        if type(one).__name__ == "CharTokenizer":
            assert ids.tolist() == [vocab[c] for c in text]


def hf_config(data: bytes) -> None:
    """config.json of another system: the model has exactly the tensors of the files, or an error is raised."""
    _described(Path("hf"), SMALL, data)


def family_config(data: bytes) -> None:
    """The same for the other families, each with its own files."""
    try:
        name = str(json.loads(data)["model_type"])
    except (ValueError, KeyError, TypeError, RecursionError):
        name = "llama"
    name = name if name in OF_FAMILIES else "llama"
    _described(Path(name), OF_FAMILIES[name], data, FAMILIES[name])


def _described(folder: Path, of: ModelConfig, data: bytes, family: Family | None = None) -> None:
    if not folder.is_dir():
        hf_folder(folder, of, family=family)
    (folder / "config.json").write_bytes(data)
    _, model, form, weights = open_model(folder)
    check_weights(weights, model, form)
    assert model.parameters == sum(int(np.prod(t.shape)) for t in weights.tensors.values())


def checkpoint(data: bytes) -> None:
    """A file next to a checkpoint's arrays, with or without a new checksum: the saved weights, or an error."""
    run, saved = _saved_run(Path.cwd())
    folder = run.checkpoints / "0"
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.parent.name != "d")
    file, sealed, content = files[(data + b"\0")[0] % len(files)], data[1:2] == b"\1", data[2:]
    before, info = file.read_bytes(), read_info(folder)
    try:
        file.write_bytes(content)
        if sealed and file.name != SEAL:
            seal(folder, info)
        latest_valid(run.checkpoints, lambda _: None)
        found = load(run.path).params
        assert sealed or content == before
        jax.tree.map(np.testing.assert_array_equal, found, saved)
    finally:
        file.write_bytes(before)
        seal(folder, info)


@lru_cache(maxsize=1)
def _saved_run(folder: Path) -> tuple[Run, Any]:
    """Save a run and return its weights."""
    run = Run(run_folder(folder / "run", SMALL))
    return run, load(run.path).params


def safetensors(data: bytes) -> None:
    """A safetensors file: arrays have the shapes of the header and are finite."""
    path = Path("model.safetensors")
    path.write_bytes(data)
    weights = Weights(path)
    for name, stored in weights.tensors.items():
        weights.check({name: stored.shape}, lambda _: True)
        if not stored.shape or not all(stored.shape):
            continue  # no model has a scalar or empty weight
        assert np.prod(stored.shape) * 2 <= len(data)
        value = weights.read(name)
        assert value.shape == stored.shape
        assert np.isfinite(value).all()


def token_file(data: bytes) -> None:
    """A `.bin` file: its ids, as many as its size implies."""
    path = Path("train.bin")
    path.write_bytes(data)
    ids = open_tokens(path)
    plain = np.frombuffer(data[: len(data) // 2 * 2], "<u2")
    start = 1024 if ids.offset else 0
    np.testing.assert_array_equal(ids, plain if not start else np.frombuffer(data[1024:], ids.dtype))
    assert len(ids) * ids.itemsize + start == len(data)


def conversations(data: bytes) -> None:
    """A file of conversations: the targets are the assistant's messages, line by line."""
    path = Path("chats.jsonl")
    path.write_bytes(data)
    tokenizer, template = _chat()
    found, _ = read_conversations(path, tokenizer, template)
    values = [json.loads(line) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    for (ids, trained), value in zip(found, values, strict=True):
        plain = not isinstance(value.get("messages"), list)
        talk = [{"role": "assistant", "content": value["completion"]}] if plain else value["messages"]
        said = [m["content"] + "<|end|>" for m in talk if m["role"] == "assistant"]
        assert tokenizer.decode(ids[trained]) == "".join(said)


@lru_cache(maxsize=1)
def _chat() -> tuple[Any, ChatTemplate]:
    """Return a tokenizer of bytes and two special tokens, and a template."""
    library = HFTokenizer.from_str(ByteTokenizer().to_json())
    library.add_special_tokens([AddedToken(name, special=True) for name in ("<|user|>", "<|end|>")])
    header = "{{ '<|user|>' + m.role + ':' }}"
    body = f"{{% for m in messages %}}{header}{{{{ m.content + '<|end|>' }}}}{{% endfor %}}"
    return SubwordTokenizer(library), ChatTemplate(
        body + "{% if add_generation_prompt %}{{ '<|user|>assistant:' }}{% endif %}"
    )


def metrics(data: bytes) -> None:
    """metrics.jsonl: the lines read are lines of the file, and can be plotted."""
    path = Path("metrics.jsonl")
    path.write_bytes(data)
    lines = list(read_metrics(path))
    there = [line.strip() for line in data.split(b"\n")]
    for line in lines:
        assert type(line["step"]) is int
        assert any(line == _loads(text) for text in there)
    if len(data) % 100 == 0:  # plotting takes 1000x as long as reading
        with contextlib.suppress(UserError):  # no losses
            draw_run(Run(Path()), "a $title^")


def arguments(data: bytes) -> None:
    """The command line up to the start of the work: settings have the given values."""
    words = data.decode("utf-8", "surrogateescape").split("\x1f")
    name = words[0] if words[0] in COMMANDS else "train"
    with contextlib.redirect_stdout(io.StringIO()):
        given = parsed(name, *words[1:])
    settings = given.get("settings", {})
    config = with_settings(preset("python-char"), settings)
    assert from_json(to_json(config)) == config
    for flag, value in itertools.pairwise(words[1:]):
        setting = flag.removeprefix("--").replace("-", "_")
        if setting in settings and re.fullmatch(r"[0-9]{1,6}", value) and words.count(flag) == 1:
            assert settings[setting] in (int(value), value)


def _loads(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
