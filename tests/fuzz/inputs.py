"""The inputs of every target: valid seeds, and strategies that mutate them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from folders import LLAMA, OF_FAMILIES, SMALL, run_folder
from mutations import HARD, Make, changed, changed_bytes, changed_json
from safetensors.numpy import save

from jaxgpt.cli.parse import COMMANDS
from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.convert import gpt2
from jaxgpt.convert.models import FAMILIES
from jaxgpt.data.cuts import LLAMA3
from jaxgpt.data.tokenizer_files import make_tokenizer
from jaxgpt.presets import preset

TEXT = "the cat sat on the mat, and the dog -- it's 2 o'clock!\n\nThey'll say: \"no\".\n" * 4
SECTIONS = (ModelConfig, DataConfig, OptimConfig, TrainConfig, MeshConfig)
SETTINGS = [f.name for section in (Config, *SECTIONS) for f in fields(section)]

CONFIGS = [asdict(preset(name)) for name in ("python-char", "gpt2", "llama-tiny", "statquest")]
TOKENIZERS: list[Any] = [
    json.loads(make_tokenizer(kind, TEXT, 270, 5).to_json()) for kind in ("char", "word", "ids", "bpe")
]
TOKENIZERS += [
    TOKENIZERS[-1] | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}}
    for pattern in (*LLAMA3, r"\s+")
    for split in [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    for byte_level in [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
]
TOKENIZERS.append(
    TOKENIZERS[0]
    | {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.5]]},
    }
)
SCALED = FAMILIES["llama"].config_to_hf(replace(LLAMA, rope_factor=8.0))
CONFIGS_OF_FAMILIES = [SCALED, *(FAMILIES[name].config_to_hf(model) for name, model in OF_FAMILIES.items())]
OPTIONS_OF_FAMILIES = sorted({option for config in CONFIGS_OF_FAMILIES for option in config})
RECIPE = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": True, "text": "text.txt"}
TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.ones((2, 2, 2), np.float16),
    "c": np.zeros((0, 3), np.float32),
    "d": np.array(1.0, np.float32),
}
SAFETENSORS = [save(TENSORS), save({"x": np.ones(5, np.float32)}, {"format": "pt"})]
METRICS = "".join(
    json.dumps({"step": s, "loss": 4.0 / (s + 1), "lr": 1e-3, "tokens": 99} | ({"val_loss": 2.0} if s % 2 else {}))
    + "\n"
    for s in range(4)
).encode()


TALKS: list[Any] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "H\u00e9!\n"}]},
    {
        "messages": [
            {"role": r, "content": c} for r, c in (("system", "x"), ("user", ""), ("assistant", " y "), ("user", "z"))
        ]
    },
    {"prompt": "2 + 2 =", "completion": " 4"},
]


def _header(magic: int, version: int, count: int) -> bytes:
    return np.array([magic, version, count] + [0] * 253, "<i4").tobytes()


TOKEN_FILES = [
    np.arange(600, dtype="<u2").tobytes(),
    _header(20240520, 1, 8) + np.arange(8, dtype="<u2").tobytes(),
    _header(20240801, 7, 4) + np.arange(4, dtype="<u4").tobytes(),
    _header(20240520, 1, 0),
]


def _lying_header(rng: Random) -> bytes:
    """Change the header of a safetensors file, but not its data."""
    data = rng.choice(SAFETENSORS)
    length = int.from_bytes(data[:8], "little")
    header = changed_json([json.loads(data[8 : 8 + length])], ["dtype", "shape", "data_offsets", "__metadata__"])(rng)
    told = rng.choice([len(header), len(header), len(header), rng.randrange(2**16), 2**63, len(header) + 1])
    return told.to_bytes(8, "little") + header + data[8 + length :]


def _token_header(rng: Random) -> bytes:
    numbers = [rng.choice([0, 1, 7, -1, 4, 8, 2**31 - 1, -(2**31)]) for _ in range(2)]
    head = _header(rng.choice([20240520, 20240801]), *numbers)
    return head[: rng.choice([1024, 1024, 12, 1023])] + rng.randbytes(rng.choice([0, 8, 16, rng.randrange(40)]))


def _metrics_lines(rng: Random) -> bytes:
    line = changed_json([json.loads(x) for x in METRICS.splitlines()], ["step", "loss", "val_loss"])
    return b"\n".join(line(rng) for _ in range(rng.randrange(6)))


def _chat_lines(rng: Random) -> bytes:
    line = changed_json(TALKS, ["role", "content", "messages", "prompt", "completion", "text"])
    kept = [json.dumps(rng.choice(TALKS)).encode() for _ in range(rng.randrange(3))]
    return rng.choice([b"\n", b"\r\n", b"\n\n"]).join([*kept, *(line(rng) for _ in range(rng.randrange(2)))])


@lru_cache(maxsize=1)
def _beside_arrays() -> list[tuple[bytes, Make]]:
    """Return the files next to a checkpoint's arrays, in order of names, with a mutation for each."""
    with TemporaryDirectory() as folder:
        root = run_folder(Path(folder) / "run", SMALL) / "checkpoints" / "0"
        files = [p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file() and p.parent.name != "d"]
    keys = "tree_metadata value_type skip_deserialize write_shape custom_metadata manifest config item_handlers".split()
    changes = [changed_json([json.loads(data)], keys) if data[:1] == b"{" else changed_bytes([data]) for data in files]
    return list(zip(files, changes, strict=True))


def _checkpoint(rng: Random) -> bytes:
    which = rng.randrange(len(_beside_arrays()))
    data, change = _beside_arrays()[which]
    return bytes([which, rng.randrange(2)]) + rng.choice([change, change, changed_bytes([data]), lambda _: data])(rng)


FLAGS = [
    f"--{s}.{f.name.replace('_', '-')}"
    for s, c in zip(("model", "data", "optim", "train", "mesh"), SECTIONS, strict=True)
    for f in fields(c)
]
FLAGS += "--out --resume --overwrite --init-from --help -h --json --prompt --stop --temperature --top-k --checkpoint --".split()
FLAGS += (
    "--weights --seed --key --steps --data.path --model.no-bias --no-json --tokenizer --revision --stop-ids".split()
)
VALUES = [
    h for h in HARD if len(h) < 1000
] + "adamw gelu true False 3 0.5 float32 1_000 0x10 \u0663 nan inf -inf a,b --".split()


def _arguments(rng: Random) -> bytes:
    name = rng.choice(["train", *COMMANDS])
    words = [name] + ["runs/x"] * (rng.randrange(3) if name != "train" else 0)
    for _ in range(rng.randrange(5)):
        flag = rng.choice(FLAGS)
        value = rng.choice([*VALUES, str(rng.randint(-2, 10 ** rng.randrange(1, 20))), str(rng.randint(1, 9))])
        words += rng.choice([[flag, value], [flag, value], [f"{flag}={value}"], [flag], [value], [flag[:-1], value]])
    return "\x1f".join(words).encode("utf-8", "surrogatepass")


MAKES: dict[str, tuple[Make, ...]] = {
    "config": changed(CONFIGS, SETTINGS),
    "tokenizer": changed(TOKENIZERS, "type vocab merges Regex String content id pattern dropout".split()),
    "hf_config": changed(
        [gpt2.FAMILY.config_to_hf(SMALL), RECIPE], [*gpt2.FAMILY.config_to_hf(SMALL), "model_type", "n_ctx"]
    ),
    "family_config": changed(CONFIGS_OF_FAMILIES, [*OPTIONS_OF_FAMILIES, *SCALED["rope_parameters"], "rope_scaling"]),
    "safetensors": (_lying_header, changed_bytes(SAFETENSORS)),
    "token_file": (_token_header, changed_bytes(TOKEN_FILES)),
    "conversations": (_chat_lines, changed_bytes([b"\n".join(json.dumps(talk).encode() for talk in TALKS)])),
    "metrics": (_metrics_lines, changed_bytes([METRICS])),
    "arguments": (_arguments,),
    "checkpoint": (_checkpoint,),
}
