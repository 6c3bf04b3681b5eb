"""Any file or command line gives a one-line error or a correct result, never a crash, a hang or a wrong number.

Each target makes an input from a random generator and checks the result. It raises `UserError` for a rejected input.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import pytest
from folders import LLAMA, OF_FAMILIES, SMALL, hf_folder, nanogpt_folder, run_folder
from helpers import parsed
from mutations import HARD, changed_bytes, changed_json
from safetensors.numpy import save
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from jaxgpt.checkpoint.info import SEAL, read_info, seal
from jaxgpt.checkpoint.intact import latest_valid
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.draw import draw_run
from jaxgpt.cli.parse import COMMANDS
from jaxgpt.cli.settings import with_settings
from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.config_json import from_json, to_json
from jaxgpt.convert.families import FAMILIES
from jaxgpt.convert.files import open_safetensors
from jaxgpt.convert.open_model import open_model
from jaxgpt.convert.read_weights import checked_names
from jaxgpt.data.chat.encoding import ChatFormat
from jaxgpt.data.chat.formats import Formats
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.conversations import read_conversations
from jaxgpt.data.token_files import open_tokens
from jaxgpt.data.tokenizers.base import ByteTokenizer
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.data.tokenizers.word_patterns import LLAMA3, QWEN, split_by
from jaxgpt.errors import UserError
from jaxgpt.lm import load
from jaxgpt.model.params import count_parameters
from jaxgpt.presets import preset
from jaxgpt.trainer.metrics import read_metrics

SECONDS = 5.0  # CPU seconds per input
SECTIONS = {"model": ModelConfig, "data": DataConfig, "optim": OptimConfig, "train": TrainConfig, "mesh": MeshConfig}
SETTINGS = [*(f.name for section in (Config, *SECTIONS.values()) for f in fields(section))]
CONFIGS = [asdict(preset(name)) for name in ("python-char", "gpt2", "llama-tiny", "statquest")]


def config(rng: Random) -> None:
    """config.json of a run: round-trips, and every value has the declared type."""
    data = changed_json(rng, rng.choice(CONFIGS), SETTINGS)
    found = from_json(data)
    assert from_json(to_json(found)) == found
    for name, said in json.loads(data).items():
        section = getattr(found, name)
        values = [(getattr(section, key), said[key]) for key in said] if isinstance(said, dict) else [(section, said)]
        for mine, value in values:
            mine = list(mine) if isinstance(mine, tuple) else mine  # JSON has lists
            assert mine == value
            assert isinstance(mine, float) or type(mine) is type(value)


TEXT = "the cat sat on the mat, and the dog -- it's 2 o'clock!\n\nThey'll say: \"no\".\n" * 4
PROBES = ("", "a", "the cat  sat\n on 12 mats", "a" * 36 + "!", "\u00e9\u4e2d\U0001f600")
TOKENIZERS = [json.loads(make_tokenizer(kind, TEXT, 270, 5).to_json()) for kind in ("char", "word", "ids", "bpe")]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TOKENIZERS += [
    TOKENIZERS[-1] | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_by(pattern), BYTE_LEVEL]}}
    for pattern in (LLAMA3, QWEN, r"\s+")
]


def tokenizer(rng: Random) -> None:
    """tokenizer.json: ids are below vocab_size, deterministic, and the same after saving and loading."""
    data = changed_json(
        rng, rng.choice(TOKENIZERS), "type vocab merges Regex String content id pattern dropout".split()
    )
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


def model(rng: Random) -> None:
    """config.json of another system: the model has exactly the tensors of the files, or an error is raised."""
    name = rng.choice(["gpt2", "nanogpt", *OF_FAMILIES])
    folder = Path(name)
    if not folder.is_dir() and name == "nanogpt":
        nanogpt_folder(folder)
    elif not folder.is_dir():
        hf_folder(folder, OF_FAMILIES.get(name, SMALL), family=FAMILIES[name])
    written = (folder / "config.json").read_text()
    scaled = FAMILIES["llama"].config_to_hf(replace(LLAMA, rope_factor=8.0))
    value = scaled if name == "llama" and rng.random() < 0.5 else json.loads(written)
    try:
        (folder / "config.json").write_bytes(changed_json(rng, value, [*value, *scaled, "rope_scaling", "n_ctx"]))
        stored = open_model(folder)
        checked_names(stored)
        assert count_parameters(stored.config) == sum(int(np.prod(t.shape)) for t in stored.weights.tensors.values())
    finally:
        (folder / "config.json").write_text(written)


@lru_cache(maxsize=1)
def saved_run(folder: Path) -> tuple[Run, Any]:
    """Save a run and return its weights."""
    run = Run(run_folder(folder / "run", SMALL))
    return run, load(run.path).params


def checkpoint(rng: Random) -> None:
    """A file next to a checkpoint's arrays, with or without a new checksum: the saved weights, or an error."""
    run, saved = saved_run(Path.cwd())
    folder = run.checkpoints / "0"
    file = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file() and p.parent.name != "d"))
    before = file.read_bytes()
    info = read_info(folder)
    sealed = rng.random() < 0.5
    keys = "tree_metadata value_type skip_deserialize write_shape custom_metadata manifest config item_handlers".split()
    changed = changed_json(rng, json.loads(before), keys) if before[:1] == b"{" else changed_bytes(rng, before)
    content = rng.choice([changed, changed, changed, before])
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


SHAPES = {"a": (3, 4), "b": (2, 2, 2), "c": (0, 3), "d": ()}
SAFETENSORS = [
    save({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}),
    save({"x": np.ones(5, np.float32)}, {"format": "pt"}),
]


def safetensors(rng: Random) -> None:
    """A safetensors file: arrays have the shapes of the header and are finite."""
    data = rng.choice(SAFETENSORS)
    length = int.from_bytes(data[:8], "little")
    header = changed_json(rng, json.loads(data[8 : 8 + length]), ["dtype", "shape", "data_offsets", "__metadata__"])
    told = rng.choice([len(header), len(header), len(header), rng.randrange(2**16), 2**63, len(header) + 1])
    lying = told.to_bytes(8, "little") + header + data[8 + length :]
    data = rng.choice([lying, changed_bytes(rng, data)])
    path = Path("model.safetensors")
    path.write_bytes(data)
    weights = open_safetensors(path)
    for name, stored in weights.tensors.items():
        weights.check({name: stored.shape}, lambda _: True)
        if not stored.shape or not all(stored.shape):
            continue  # no model has a scalar or empty weight
        assert np.prod(stored.shape) * 2 <= len(data)
        value = weights.read(name)
        assert value.shape == stored.shape
        assert np.isfinite(value).all()


def token_file(rng: Random) -> None:
    """A `.bin` file: its ids, as many as its size implies."""
    magic, dtype, version = rng.choice([(20240520, "<u2", 1), (20240801, "<u4", 7)])
    count = rng.choice([0, 1, 8, 8, -1, 2**31 - 1])
    head = np.array([magic, rng.choice([version, version, 0, 2]), count] + [0] * 253, "<i4").tobytes()
    whole = head + np.arange(8, dtype=dtype).tobytes()
    data = rng.choice([whole, whole[: rng.randrange(len(whole))], whole[1024:], changed_bytes(rng, whole)])
    path = Path("train.bin")
    path.write_bytes(data)
    ids = open_tokens(path)
    start = 1024 if ids.offset else 0
    np.testing.assert_array_equal(ids, np.frombuffer(data[start:], ids.dtype if start else "<u2"))
    assert len(ids) * ids.itemsize + start == len(data)


TALKS: list[Any] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "H\u00e9!\n"}]},
    {"messages": [{"role": role, "content": role[1:3]} for role in ("system", "user", "assistant", "user")]},
    {"prompt": "2 + 2 =", "completion": " 4"},
]


@lru_cache(maxsize=1)
def chat() -> tuple[Any, ChatTemplate]:
    """Return a tokenizer of bytes and two special tokens, and a template."""
    library = HFTokenizer.from_str(ByteTokenizer().to_json())
    library.add_special_tokens([AddedToken(name, special=True) for name in ("<|user|>", "<|end|>")])
    source = "{% for m in messages %}{{ '<|user|>' + m.role + ':' }}{{ m.content + '<|end|>' }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ '<|user|>assistant:' }}{% endif %}"
    return SubwordTokenizer(library), ChatTemplate(source)


def conversations(rng: Random) -> None:
    """A file of conversations: the targets are the assistant's messages, line by line."""
    lines = [json.dumps(rng.choice(TALKS)).encode() for _ in range(rng.randrange(3))]
    lines.append(changed_json(rng, rng.choice(TALKS), ["role", "content", "messages", "prompt", "completion", "text"]))
    data = rng.choice([b"\n", b"\r\n", b"\n\n"]).join(lines)
    path = Path("chats.jsonl")
    path.write_bytes(data)
    bytes_and_names, template = chat()
    form = ChatFormat(template, bytes_and_names)
    found = read_conversations(DataConfig(path=str(path)), bytes_and_names, Formats(form, form)).train
    lines = [line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    if not lines or lines[0].strip()[:1] == b"[" or lines[0].strip() == b"{":
        return  # empty, or read as a whole instead of line by line
    for [(ids, trained)], line in zip(found, lines, strict=True):
        said = answers(line)
        if said is not None:
            assert bytes_and_names.decode(ids[trained]) == "".join(answer + "<|end|>" for answer in said)


def answers(line: bytes) -> list[str] | None:
    """Return the texts of the assistant in a line of messages or a prompt; None: a different shape."""
    match json.loads(line, parse_int=float):
        case {"messages": [*messages]}:
            texts = [(m.get("role"), m.get("content")) for m in messages if isinstance(m, dict) and len(m) == 2]
            is_plain = len(texts) == len(messages) and all(isinstance(content, str) for _, content in texts)
            return [content for role, content in texts if role == "assistant"] if is_plain else None
        case {"prompt": str(), "completion": str() as completion}:
            return [completion]
    return None


def metrics(rng: Random) -> None:
    """metrics.jsonl: the lines read are lines of the file, and can be plotted."""
    line = {"step": 1, "loss": 2.0, "lr": 1e-3, "tokens": 99, "val_loss": 2.0}
    data = b"\n".join(changed_json(rng, line, ["step", "loss", "val_loss"]) for _ in range(rng.randrange(6)))
    path = Path("metrics.jsonl")
    path.write_bytes(data)
    valid = []
    for text in data.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            valid.append(json.loads(text))
    for found in read_metrics(path):
        assert type(found["step"]) is int
        assert found in valid
    if rng.random() < 0.01:  # plotting takes 1000x as long as reading
        with contextlib.suppress(UserError):  # no losses
            draw_run(Run(Path()), "a $title^")


FLAGS = [f"--{name}.{f.name.replace('_', '-')}" for name, section in SECTIONS.items() for f in fields(section)]
FLAGS += """--out --resume --overwrite --init-from --help -h --json --prompt --stop --temperature --top-k --checkpoint --
    --weights --seed --key --steps --model.no-bias --no-json --tokenizer --revision --stop-ids""".split()
VALUES = [*(h for h in HARD if len(h) < 1000), *"adamw gelu true False 3 0.5 1_000 0x10 \u0663 nan inf a,b --".split()]


def arguments(rng: Random) -> None:
    """The command line up to the start of the work: settings have the given values."""
    name = rng.choice(["train", *COMMANDS])
    words = ["runs/x"] * (rng.randrange(3) if name != "train" else 0)
    for _ in range(rng.randrange(5)):
        flag = rng.choice(FLAGS)
        value = rng.choice([*VALUES, str(rng.randint(-2, 10 ** rng.randrange(1, 20))), str(rng.randint(1, 9))])
        words += rng.choice([[flag, value], [flag, value], [f"{flag}={value}"], [flag], [value], [flag[:-1], value]])
    with contextlib.redirect_stdout(io.StringIO()):
        settings = parsed(name, *words).get("settings", {})
    found = with_settings(preset("python-char"), settings)
    assert from_json(to_json(found)) == found
    names = [word.partition("=")[0] for word in words]
    for flag, value in itertools.pairwise(words):
        setting = flag.removeprefix("--").replace("-", "_")
        if setting in settings and re.fullmatch(r"[0-9]{1,6}", value) and names.count(flag) == 1:
            assert settings[setting] in (int(value), value, True)  # a flag may precede the target


TARGETS = [config, tokenizer, model, checkpoint, safetensors, token_file, conversations, metrics, arguments]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
@pytest.mark.parametrize("examples", [40, pytest.param(10_000, marks=pytest.mark.long)])
def test_fuzz(target: Callable[[Random], None], examples: int) -> None:
    accepted = 0
    for number in range(examples):
        began = time.process_time()
        try:
            target(Random(number))
            accepted += 1
        except UserError as e:
            assert len(str(e).splitlines()) == 1, f"input {number}: not one line: {str(e)!r}"
            assert 10 < len(str(e)) <= 1100
        except Exception as e:
            pytest.fail(f"{target.__name__}(Random({number})): {type(e).__name__}: {e}")
        assert time.process_time() - began < SECONDS, number
    assert accepted > 0
