"""GGUF files of every family: weights, settings, and the greedy ids and log probabilities of llama.cpp itself."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import hf_folder
from gguf_files import BPE, GEMMA, LLAMA, MODELS, convert
from llamacpp_values import PROMPT, RECORDED, compute, source

from jaxgpt.convert.canonical import canonical
from jaxgpt.convert.families import FAMILIES
from jaxgpt.convert.family import TRAINING
from jaxgpt.convert.gguf.model import open_gguf
from jaxgpt.convert.llamacpp import config as llamacpp
from jaxgpt.convert.llamacpp.architectures import ARCHITECTURES, architecture_of
from jaxgpt.convert.llamacpp.layout import layout
from jaxgpt.convert.open_model import read_model
from jaxgpt.convert.tensor_layout import to_leaves, to_tensor
from jaxgpt.convert.tensors import expand, leaf_shapes
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.params import flatten_params

pytest.importorskip("gguf")

LLAMA_CPP = json.loads(RECORDED.read_text())
every_model = pytest.mark.parametrize("name", MODELS)


def imported(name: str, folder: Path, **more: Any) -> tuple[Any, Any]:
    """Convert a model, and return the config and the weights of the GGUF file."""
    convert(source(name, folder), folder / "m.gguf", **more)
    model, params, _ = read_model(folder / "m.gguf")
    return model, params


def settings(model: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(canonical(model)).items() if name not in TRAINING}


@every_model
def test_weights_and_settings_equal_the_original_s(name: str, tmp_path: Path) -> None:
    model, params = imported(name, tmp_path)
    expected, original, _ = read_model(tmp_path / f"{name}-hf")
    assert settings(model) == settings(expected)
    ours = flatten_params(params)
    theirs = flatten_params(original)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[path], path)


@every_model
def test_greedy_ids_and_log_probabilities_equal_llama_cpp_s(name: str, tmp_path: Path) -> None:
    """llama.cpp computes GELU from a table of 16-bit numbers: the tolerance of log probabilities is 2e-3 nats."""
    model, params = imported(name, tmp_path)
    recorded = LLAMA_CPP["greedy"][name]
    ids = np.array([PROMPT + recorded["ids"]], np.int32)
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(GPT(model).apply)({"params": params}, jnp.asarray(ids))
    log_p = np.asarray(jax.nn.log_softmax(logits[0, len(PROMPT) - 1 : -1]))
    assert log_p.argmax(-1).tolist() == recorded["ids"]
    np.testing.assert_allclose(log_p.max(-1), recorded["log_p"], atol=2e-3)


@pytest.mark.long
def test_llama_cpp_computes_the_recorded_values(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "words").mkdir()
    values = compute(tmp_path)
    assert values["words"] == LLAMA_CPP["words"]
    for name, found in values["greedy"].items():
        assert found["ids"] == LLAMA_CPP["greedy"][name]["ids"]
        np.testing.assert_allclose(found["log_p"], LLAMA_CPP["greedy"][name]["log_p"], atol=1e-3)


@every_model
def test_weight_tables_are_invertible(name: str) -> None:
    """Splitting a tensor into leaves and joining them is the identity."""
    architecture = architecture_of(name.split("-")[0])
    config = MODELS[name]
    rng = np.random.default_rng(0)
    shapes = leaf_shapes(config)
    leaves = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    back = {}
    for row in expand(layout(architecture, config).table, config):
        back |= to_leaves(row, to_tensor(row, leaves), shapes)
    assert back.keys() == leaves.keys()
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(back[path], leaf)


SWA = "attention.sliding_window"
# Model, metadata of the file, and the settings that it means.
READ = {
    "a period": ("gemma3_text", {f"{SWA}_pattern": 3}, {"window_pattern": "LLG"}),
    "a pattern": ("gemma3_text", {f"{SWA}_pattern": [True, False]}, {"window_pattern": "LG"}),
    "all layers": ("gemma3_text", {f"{SWA}_pattern": 0}, {"sliding_window": 6, "window_pattern": "L"}),
    "no layers": ("gemma3_text", {f"{SWA}_pattern": 1}, {"sliding_window": 0}),
    "no window": ("gemma3_text", {SWA: 0}, {"sliding_window": 0}),
    "local base": ("gemma3_text", {"rope.freq_base_swa": 50.0}, {"rope_local_theta": 50.0}),
    "default local base": ("gemma3_text", {"rope.freq_base_swa": None}, {"rope_local_theta": 1e4}),
    "windows of OLMo 3": ("olmo2", {SWA: 4, f"{SWA}_pattern": [True]}, {"sliding_window": 4, "window_pattern": "L"}),
    "default period": ("olmo2", {SWA: 4}, {"sliding_window": 4, "window_pattern": "L"}),  # LLLG, of 2 layers
    "base": ("qwen3", {"rope.freq_base": None}, {"rope_theta": 1e4}),
    "epsilon": ("qwen3", {"attention.layer_norm_rms_epsilon": 1e-5}, {"norm_eps": 1e-05}),
    "scaling by default": ("qwen3", {"rope.scaling.factor": 2.0}, {"rope_factor": 2.0}),
    "scaling, old name": ("qwen3", {"rope.scale_linear": 2.0}, {"rope_factor": 2.0}),
    "no scaling": ("qwen3", {"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {"rope_factor": 1.0}),
    "a part of a head": ("gpt_neox", {"rope.dimension_count": 6}, {"rotary_width": 6}),
    "as many keys": ("gpt2", {"attention.head_count_kv": 4}, {"kv_heads": 4}),
}


@pytest.mark.parametrize("case", READ)
def test_settings_in_the_metadata_are_read(case: str, tmp_path: Path) -> None:
    name, metadata, expected = READ[case]
    convert(source(name, tmp_path), tmp_path / "m.gguf", **metadata)
    _, model, _, _ = open_gguf(tmp_path / "m.gguf")
    model = canonical(model)
    assert {setting: getattr(model, setting) for setting in expected} == expected


# Model, metadata of the file, and a part of the error.
REJECTED = {
    "experts": ("qwen3", {"expert_count": 8}, "expert_count 8 is not supported"),
    "no number of active experts": ("mixtral", {"expert_used_count": None}, "expert_used_count is missing"),
    "no experts": ("qwen3_moe", {"expert_count": None}, "expert_count is missing"),
    "scaled shares": ("olmoe", {"expert_weights_scale": 2.5}, "unknown option expert_weights_scale"),
    "shared experts": ("qwen3_moe", {"expert_shared_count": 1}, "unknown option expert_shared_count"),
    "unknown key": ("llama", {"logit_scale": 2.0}, "unknown option logit_scale .*--accept-option logit_scale"),
    "window": ("llama", {SWA: 16}, f"unknown option {SWA}"),
    "rotation": ("qwen2", {"rope.dimension_count": 4}, "rope.dimension_count 4 is not supported, only 8"),
    "values": ("qwen3", {"attention.value_length": 8}, "attention.value_length 8 is not supported, only 16"),
    "local values": ("gemma3_text", {"attention.key_length_swa": 8}, "key_length_swa 8 is not supported, only 16"),
    "scaling": ("llama", {"rope.scaling.type": "yarn"}, "rope.scaling.type 'yarn'"),
    "two scalings": ("llama-3", {"rope.scaling.factor": 2.0}, "rope_freqs.weight also scales RoPE"),
    "attention factor": ("llama", {"rope.scaling.attn_factor": 2.0}, "attn_factor 2.0"),
    "pattern": ("gemma3_text", {f"{SWA}_pattern": "LG"}, "pattern 'LG' is not supported: it must be a period"),
    "negative": ("gemma3_text", {f"{SWA}_pattern": -1}, "pattern -1 is not supported"),
    "both directions": ("qwen2", {"attention.causal": False}, "attention.causal False is not supported"),
    "no width": ("llama", {"embedding_length": None}, "embedding_length is missing"),
    "heads by layer": ("llama", {"attention.head_count": [4, 4]}, "head_count must be an integer"),
    "no heads": ("gpt2", {"attention.head_count": 0}, "head"),
    "residual": ("gpt_neox", {"use_parallel_residual": None}, "use_parallel_residual is missing"),
    "too wide": ("gpt_neox", {"rope.dimension_count": 32}, "rope_fraction"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_unsupported_metadata_is_named(case: str, tmp_path: Path) -> None:
    name, metadata, message = REJECTED[case]
    convert(source(name, tmp_path), tmp_path / "m.gguf", **metadata)
    with pytest.raises(UserError, match=message) as e:
        open_gguf(tmp_path / "m.gguf")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("width", [44, 46, 64, 96])
def test_every_number_of_rotated_channels_is_exact(width: int) -> None:
    """The config stores a fraction of the head width, which rounds."""
    values = {"block_count": 1, "context_length": 8, "embedding_length": width, "feed_forward_length": 8}
    values |= {"attention.head_count": 1, "attention.layer_norm_epsilon": 1e-5, "use_parallel_residual": True}
    metadata = {"general.architecture": "gptneox"} | {f"gptneox.{name}": value for name, value in values.items()}
    for rotated in range(2, width + 1, 2):
        given = metadata | {"gptneox.rope.dimension_count": rotated}
        _, model = llamacpp.config_from_metadata(given, {"token_embd.weight": (9, width)}, None, "m.gguf")
        assert model.rotary_width == rotated


def test_accepted_metadata_is_ignored(tmp_path: Path) -> None:
    convert(source("llama", tmp_path), tmp_path / "m.gguf", logit_scale=2.0)
    _, model, _, _ = open_gguf(tmp_path / "m.gguf", accept=["logit_scale"])
    assert settings(model) == settings(MODELS["llama"])


def test_llama_3_divisors_without_the_original_context(tmp_path: Path) -> None:
    """The file has no original context; the divisors between 1 and the factor imply it."""
    for context in (24, 100, 8192):
        folder = tmp_path / str(context)
        folder.mkdir()
        model = LLAMA.__class__(
            **asdict(LLAMA) | {"rope_factor": 8.0, "rope_original_context": context, "head_dim": 64}
        )
        hf_folder(folder / "hf", model, family=FAMILIES["llama"])
        convert(folder / "hf", folder / "m.gguf")
        _, found, _, _ = open_gguf(folder / "m.gguf")
        assert (found.rope_factor, found.rope_original_context) == (pytest.approx(8.0), context)


def test_divisors_of_a_different_scaling_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    monkeypatch.setattr("gguf_files._divisors", lambda rope, width: divisors)
    convert(source("llama-3", tmp_path), tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"rope_freqs.weight does not match Llama 3 scaling"):
        open_gguf(tmp_path / "m.gguf")


def test_gemma_3_27b_divides_scores_by_the_width_per_head() -> None:
    """llama.cpp recognizes the model by its 62 layers; its head width of 128 is not the width per head, 5376 / 32."""
    gemma = ARCHITECTURES["gemma3"]
    large = replace(GEMMA, n_layer=62, n_embd=5376, n_head=32, n_kv_head=16, head_dim=128)
    rows = layout(gemma, large).table
    factors = {row.name: row.factor for row in rows if row.factor != 1.0}
    assert factors == {"blk.{}.attn_q_norm.weight": pytest.approx(math.sqrt(128 / 168))}
    assert all(row.factor == 1.0 for row in layout(gemma, GEMMA).table)


def test_a_larger_embedding_than_the_vocabulary_of_the_metadata(tmp_path: Path) -> None:
    convert(source("llama", tmp_path), tmp_path / "m.gguf", BPE, vocab_size=3)
    _, model, _, _ = open_gguf(tmp_path / "m.gguf")
    assert model.vocab_size == MODELS["llama"].vocab_size
