"""Small model directories of other libraries, written without torch."""

import json
from dataclasses import asdict, replace

import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import save_file

from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.checkpoint.saver import save_params
from jaxgpt.config import Config, DataConfig, ModelConfig
from jaxgpt.convert import gpt2, llama
from jaxgpt.convert.gpt2 import NANOGPT
from jaxgpt.convert.tensor_layout import to_leaves
from jaxgpt.convert.tensors import expand, leaf_shapes, tensor_shape
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer

SMALL = ModelConfig(vocab_size=300, block_size=16, n_layer=2, n_head=2, n_embd=8)
LLAMA = replace(
    SMALL, positions="rope", norm="rmsnorm", mlp="gated", activation="silu", bias=False, n_kv_head=1, n_inner=12
)
# A model of each family with different tensor names from GPT-2.
OF_FAMILIES = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, sliding_window=3),
    "qwen2": replace(LLAMA, qkv_bias=True, sliding_window=3, window_pattern="GL"),
    "qwen3": replace(LLAMA, qk_norm=True),
    "gpt_neox": replace(SMALL, positions="rope", rope_fraction=0.5, parallel_residual=True),
    "gemma3_text": replace(
        LLAMA, norm_position="both", qk_norm=True, embed_scale=True, sliding_window=3, rope_local_theta=100.0
    ),
    "olmo2": replace(LLAMA, norm_position="output", qk_norm=True, qk_norm_per_head=False),
    "mixtral": replace(LLAMA, n_experts=4),
    "qwen3_moe": replace(LLAMA, n_experts=4, qk_norm=True),
    "olmoe": replace(LLAMA, n_experts=4, qk_norm=True, qk_norm_per_head=False, router_normalize=False),
}
TEXT = "To be, or not to be: that is the question.\n"


def tensors_of(table, config, seed=0):
    """Return random tensors with the names of a weight table."""
    rng = np.random.default_rng(seed)
    shapes = leaf_shapes(config)
    tensors = {}
    for row in expand(table, config):
        tensor = rng.normal(0, 0.3, tensor_shape(row, shapes))
        tensors[row.name] = tensor.astype(np.float32)
    return tensors


def hf_folder(path, config=SMALL, seed=0, family=None):
    """Write a directory as transformers does."""
    family = family or (llama.LLAMA if config.positions == "rope" else gpt2.FAMILY)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(family.config_to_hf(config)))
    (path / "tokenizer.json").write_text(make_tokenizer("byte", "", 0, 0).to_json())
    save_file(tensors_of(family.form.table, config, seed), path / "model.safetensors", {"format": "pt"})
    return path


def nanogpt_folder(path, bias=False):
    path.mkdir()
    config = replace(SMALL, vocab_size=len(set(TEXT)), bias=bias, activation="gelu")
    save_file(tensors_of(NANOGPT.table, config), path / "init.safetensors")
    settings = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": bias}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "tokenizer.json").write_text(make_tokenizer("char", TEXT, 0, 0).to_json())
    return path, config


def from_arrays(table, tensors, config):
    """Return the parameter tree of a model, from all its tensors in memory."""
    shapes = leaf_shapes(config)
    rows = expand(table, config)
    expected_shapes = {row.name: tensor_shape(row, shapes) for row in rows}
    assert expected_shapes == {name: x.shape for name, x in tensors.items()}
    leaves = {}
    for row in rows:
        leaves |= to_leaves(row, np.asarray(tensors[row.name], np.float32), shapes)
    return unflatten_dict(leaves, sep="/")


def run_folder(path, model, seed=0):
    """Write a run of a character model with random weights, including gains and biases."""
    rng = np.random.default_rng(seed)
    tokenizer = CharTokenizer(TEXT)
    model = replace(model, vocab_size=tokenizer.vocab_size)
    leaves = {}
    for name, shape in leaf_shapes(model).items():
        mean = 1.0 if name.endswith("scale") else 0.0  # gains are near 1
        leaves[name] = rng.normal(mean, 0.3, shape).astype(np.float32)
    params = unflatten_dict(leaves, sep="/")

    path.mkdir()
    config = Config(preset="test", model=model, data=DataConfig(dataset="none"))
    write_settings(Run(path), config, tokenizer)
    save_params(path / "checkpoints", params, {"config": asdict(config)})
    return path


def llama_tokenizer(names=()):
    """A tokenizer.json as in Llama 2: words begin with a marked space, a text's first space is stripped, other
    characters are bytes. With `names`, adds special tokens `<s>`, `</s>` and `names`, and texts begin with `<s>`."""
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "<s>", "</s>", *byte_names, "\u2581", *"ab", "ab", "\u2581a", "\u00e9"]
    steps = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    prepare = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    model = {
        "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": {w: i for i, w in enumerate(words)},
        "merges": [["a", "b"], ["\u2581", "a"]],
    }  # fmt: skip
    ids = {"<s>": 1, "</s>": 2} | {name: len(words) + i for i, name in enumerate(names)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return {
        "version": "1.0", "truncation": None, "padding": None, "pre_tokenizer": None,
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in ids.items()] if names else [],
        "normalizer": {"type": "Sequence", "normalizers": prepare}, "post_processor": template if names else None,
        "decoder": {"type": "Sequence", "decoders": steps}, "model": model,
    }  # fmt: skip
