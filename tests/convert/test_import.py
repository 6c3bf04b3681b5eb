"""Imported directories become complete runs with the same weights, or nothing is written."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import LLAMA, OF_FAMILIES, SMALL, TEXT, hf_folder, llama_tokenizer, nanogpt_folder, tensors_of
from safetensors.numpy import load_file, save_file

import jaxgpt
from jaxgpt.convert import gemma, gpt2, llama, neox
from jaxgpt.convert.canonical import canonical
from jaxgpt.convert.families import FAMILIES
from jaxgpt.convert.import_model import import_model
from jaxgpt.convert.open_model import open_model
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensor_layout import to_leaves, to_tensor
from jaxgpt.convert.tensors import expand, leaf_shapes
from jaxgpt.errors import TrainingFailed, UserError
from jaxgpt.model.params import count_parameters, flatten_params


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_an_import_is_a_run(tmp_path, config):
    import_model(hf_folder(tmp_path / "hf", config), tmp_path / "run")
    lm = jaxgpt.load(tmp_path / "run")
    assert canonical(lm.config.model) == canonical(config)
    assert len(jaxgpt.generate(lm, ["ab"], max_new_tokens=3, temperature=0)[0].ids) == 3
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_weights_of_zeros(tmp_path):
    """TensorStore omits chunks of zeros by default, and Orbax then reports a damaged checkpoint."""
    folder = hf_folder(tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    zeros = {name: np.zeros_like(tensor) if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}
    save_file(zeros, folder / "model.safetensors", {"format": "pt"})
    import_model(folder, tmp_path / "run")
    params = flatten_params(jaxgpt.load(tmp_path / "run").params)
    vectors = [leaf for leaf in params.values() if leaf.ndim == 1]
    assert vectors
    assert not any(np.any(leaf) for leaf in vectors)


@pytest.mark.ci
def test_shards(tmp_path):
    whole = hf_folder(tmp_path / "one")
    parts = hf_folder(tmp_path / "many")
    shard(parts)
    (parts / "consolidated.safetensors").write_bytes(
        (whole / "model.safetensors").read_bytes()
    )  # Mistral's second copy
    import_model(whole, tmp_path / "a")
    import_model(parts, tmp_path / "b")
    for path, leaf in flatten_params(jaxgpt.load(tmp_path / "a").params).items():
        np.testing.assert_array_equal(leaf, flatten_params(jaxgpt.load(tmp_path / "b").params)[path])


def shard(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {"model-1-of-2.safetensors": list(tensors)[::2], "model-2-of-2.safetensors": list(tensors)[1::2]}
    for file, held in names.items():
        save_file({name: tensors[name] for name in held}, folder / file)


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_names_of_the_original_gpt2_files(tmp_path):
    """The files have names without prefix, mask buffers, a copy of the embedding as head, and 16-bit weights."""

    def edit(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name).astype(np.float16)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.uint8)
        tensors["lm_head.weight"] = tensors["wte.weight"]

    folder = hf_folder(tmp_path / "hf")
    before = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    change(folder, edit)
    import_model(folder, tmp_path / "run")
    wte = np.asarray(jaxgpt.load(tmp_path / "run").params["wte"]["embedding"])
    np.testing.assert_array_equal(wte, before.astype(np.float16).astype(np.float32))


def test_buffers_of_pythia_files(tmp_path):
    config = replace(SMALL, positions="rope", rope_fraction=0.5, activation="gelu", tie_embeddings=False)
    folder = hf_folder(tmp_path / "hf", config, family=neox.FAMILY)

    def edit(tensors):
        for layer in range(2):
            attention = f"gpt_neox.layers.{layer}.attention"
            tensors[f"{attention}.bias"] = np.ones((1, 1, 16, 16), np.uint8)
            tensors[f"{attention}.masked_bias"] = np.full((), -1e9, np.float32)
            tensors[f"{attention}.rotary_emb.inv_freq"] = np.ones(1, np.float32)

    change(folder, edit)
    done = import_model(folder, tmp_path / "run")
    assert (done.family, done.parameters) == ("gpt_neox", count_parameters(config))


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt(tmp_path, bias):
    folder, config = nanogpt_folder(tmp_path / "nano", bias)
    done = import_model(folder, tmp_path / "run")
    assert done.family == "nanogpt"
    lm = jaxgpt.load(tmp_path / "run")
    assert lm.config.model == config
    assert lm.tokenizer.decode(lm.tokenizer.encode(TEXT)) == TEXT
    tensors = load_file(folder / "init.safetensors")
    x = np.ones(8, np.float32)
    mine = x @ np.asarray(lm.params["h_1"]["attn"]["k_proj"]["kernel"])
    theirs = (tensors["transformer.h.1.attn.c_attn.weight"] @ x)[8:16]
    np.testing.assert_allclose(mine.reshape(-1), theirs, atol=1e-6)


def nanogpt_config(folder, **more):
    """Write the settings of a nanoGPT checkpoint as config.json."""
    model = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": True, "vocab_size": None, "dropout": 0.0}
    (folder / "config.json").write_text(json.dumps(model | more))


def test_settings_of_nanogpt(tmp_path):
    folder, config = nanogpt_folder(tmp_path / "nano", bias=True)
    nanogpt_config(folder)
    assert open_model(folder).config == config
    nanogpt_config(folder, use_rmsnorm=False, flash=True)
    with pytest.raises(UserError, match=r"unknown options flash \(True\), use_rmsnorm \(False\): .*--accept-option"):
        open_model(folder)
    assert open_model(folder, ["flash", "use_rmsnorm"]).config == config
    nanogpt_config(folder, n_layer="2")
    refused(folder, tmp_path, "n_layer must be an integer: '2'")


BAD_TENSORS = {
    "missing": (lambda t: t.pop("transformer.h.1.mlp.c_fc.weight"), r"h\.1\.mlp\.c_fc\.weight.*missing"),
    "extra": (lambda t: t.update({"odd.weight": np.ones(3, np.float32)}), r"odd\.weight is unexpected"),
    "shape": (
        lambda t: t.update({"transformer.ln_f.bias": np.ones(9, np.float32)}),
        r"ln_f\.bias.*\(9,\), expected \(8,\)",
    ),
    "dtype": (lambda t: t.update({"transformer.ln_f.bias": np.ones(8, np.int32)}), r"ln_f\.bias.*I32"),
    "nan": (lambda t: t["transformer.ln_f.bias"].fill(np.nan), r"ln_f\.bias.*non-finite"),
    "untied": (lambda t: t.update({"lm_head.weight": np.ones((300, 8), np.float32)}), r"lm_head\.weight differs"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_raise_and_nothing_is_written(tmp_path, case):
    edit, message = BAD_TENSORS[case]
    folder = hf_folder(tmp_path / "hf")
    change(folder, edit)
    refused(folder, tmp_path, message)


def refused(folder, tmp_path, message):
    with pytest.raises(UserError, match=message) as e:
        import_model(folder, tmp_path / "out" / "run")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


BAD_OPTIONS = {
    "list of architectures": ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported: use one of gpt2"),
    "architecture": (
        {"model_type": "opt"},
        r"'opt' is not supported: use one of gpt2, llama, mistral, qwen2, qwen3, gpt_neox, gemma3_text, olmo2, "
        r"mixtral, qwen3_moe, olmoe, gemma3, mistral3, llava; "
        r"docs/families.md shows how",
    ),
    "head": ({"architectures": ["GPT2ForSequenceClassification"]}, "GPT2ForSequenceClassification"),
    "vocabulary": ({"vocab_size": 0}, "vocab_size 0 is not supported: it must be at least 1"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_unsupported_options_are_named(tmp_path, case):
    values, message = BAD_OPTIONS[case]
    folder = hf_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, tmp_path, message)


GPT2_OPTIONS = {
    "activation": ({"activation_function": "quick_gelu"}, "activation_function 'quick_gelu'"),
    "cross": ({"add_cross_attention": True}, "add_cross_attention True"),
    "unknown": ({"alibi": True}, "option alibi"),
    "type": ({"n_layer": "2"}, "n_layer must be an integer"),
    "bool": ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    "dropout": ({"attn_pdrop": 0.3}, "attn_pdrop"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "heads": ({"n_head": 5}, "n_head 5 does not divide"),
}
LLAMA_OPTIONS = {
    "longrope": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "longrope"),
    "dynamic-4": ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "partial": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "contradiction": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling"),
    "one bias": ({"mlp_bias": True}, "mlp_bias"),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved"),
    "attention dropout": ({"attention_dropout": 0.1}, "attention_dropout"),
}


QWEN = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "use_sliding_window": True,
    "sliding_window": 4,
}
FULL = "full_attention"
LOCAL = "sliding_attention"
WINDOWS = {
    "off": ({"use_sliding_window": False, "max_window_layers": 2}, (0, "L")),
    "null": ({"sliding_window": None, "max_window_layers": 2}, (0, "L")),
    "none": ({"max_window_layers": 28}, (0, "L")),
    "all": ({"max_window_layers": 0}, (4, "L")),
    "from two on": ({"max_window_layers": 2}, (4, "GGLLLL")),
    "listed": ({"layer_types": [FULL, LOCAL] * 3}, (4, "GL")),
    "with a rest": ({"layer_types": [LOCAL, LOCAL, FULL, LOCAL, LOCAL, FULL]}, (4, "LLG")),
}


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("family", [llama.QWEN2, llama.QWEN3], ids=["qwen2", "qwen3"])
def test_windows_of_qwen(family, case):
    values, expected = WINDOWS[case]
    model = family.config_from_hf(Options(QWEN | values, "config.json"))
    assert (model.sliding_window, model.window_pattern) == expected
    again = family.config_to_hf(model)
    assert canonical(family.config_from_hf(Options(again, "config.json"))) == canonical(model)


BAD_FAMILIES = {
    **{name: (gpt2.FAMILY, values, said) for name, (values, said) in GPT2_OPTIONS.items()},
    **{name: (llama.LLAMA, llama.LLAMA.config_to_hf(LLAMA) | v, said) for name, (v, said) in LLAMA_OPTIONS.items()},
    "layers": (llama.QWEN2, QWEN | {"layer_types": [FULL]}, "layer_types .* must list 6 layers"),
    "kind": (
        llama.QWEN3,
        QWEN | {"layer_types": [FULL, "chunked_attention"] * 3},
        "layer_types .* one of full_attention",
    ),
    "no window": (
        llama.QWEN2,
        QWEN | {"use_sliding_window": False, "layer_types": [LOCAL] * 6},
        "sliding_window 0",
    ),
    "ministral": (llama.MISTRAL, {"layer_types": [FULL]}, "unknown option layer_types"),
    "window": (llama.MISTRAL, {"sliding_window": "4"}, "sliding_window must be an integer: '4'"),
    "soft cap": (gemma.FAMILY, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
    "both ways": (gemma.FAMILY, {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    "scalar": (gemma.FAMILY, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0.0 .* must be above 0"),
    "pattern": (gemma.FAMILY, {"sliding_window_pattern": 0}, "sliding_window_pattern 0 .* at least 1"),
    "rope of one kind": (gemma.FAMILY, {"rope_parameters": {"rope_theta": 1e4}}, "objects named full_attention"),
    "scaled windows": (
        gemma.FAMILY,
        {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2.0}}},
        "scaling is not supported in layers of type sliding_attention",
    ),
    "two scalings": (
        gemma.FAMILY,
        {"rope_scaling": {"factor": 8.0}, "rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0}}},
        "rope_scaling .* contradicts rope_parameters",
    ),
    "a base that transformers ignores": (
        llama.LLAMA,
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling .* transformers then ignores rope_theta in rope_parameters",
    ),
    "a factor of attention that transformers ignores": (
        llama.LLAMA,
        {"rope_parameters": {"attention_factor": 2.0}, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "rope_scaling .* transformers then ignores attention_factor",
    ),
    "no bias": (neox.FAMILY, {"attention_bias": False}, "attention_bias False is not supported, only True"),
    "odd": (neox.FAMILY, {"rotary_pct": 0.1}, "rope_fraction 0.1 rotates 9 of the 96"),
    "two bases": (neox.FAMILY, {"rope_theta": 500}, "rope_theta 500 is not supported, only 10000.0"),
    "two fractions": (
        neox.FAMILY,
        {"partial_rotary_factor": 1.0},
        "partial_rotary_factor 1.0 is not supported, only 0.25",
    ),
    "scaled": (neox.FAMILY, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    "factor of attention without scaling": (
        llama.LLAMA,
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.2}},
        "attention_factor 1.2 is not supported: with a factor of 1, it must be 1",
    ),
    "biases": (llama.OLMO2, {"attention_bias": True}, "attention_bias True is not supported, only False"),
}


OFF = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28, "mlp_only_layers": []}


def test_options_of_other_families_that_are_switched_off():
    """A Qwen converted to a Llama keeps the options of its windows, which are off."""
    values = llama.LLAMA.config_to_hf(LLAMA)
    options = Options(values | OFF, "config.json")
    assert canonical(llama.LLAMA.config_from_hf(options)) == canonical(LLAMA)
    options.done()


def test_options_of_other_families_that_are_switched_on():
    values = llama.LLAMA.config_to_hf(LLAMA)
    options = Options(values | OFF | {"use_sliding_window": True}, "config.json")
    llama.LLAMA.config_from_hf(options)
    with pytest.raises(UserError, match=r"unknown options max_window_layers .* sliding_window .* use_sliding_window"):
        options.done()


def test_rotary_settings_of_neox_under_two_names():
    """transformers 4.46 writes rotary_emb_base and rotary_pct, and the same values as rope_theta and partial_rotary_factor."""
    values = {"rotary_emb_base": 500, "rope_theta": 500, "rotary_pct": 0.5, "partial_rotary_factor": 0.5}
    options = Options(values, "config.json")
    model = neox.FAMILY.config_from_hf(options)
    options.done()
    assert (model.rope_theta, model.rope_fraction) == (500.0, 0.5)


@pytest.mark.parametrize(("values", "heads"), [({}, 8), ({"num_key_value_heads": None}, 32)], ids=["absent", "null"])
def test_key_heads_of_mistral(values, heads):
    """MistralConfig in transformers has 8 key/value heads by default; null means one per query head."""
    assert llama.MISTRAL.config_from_hf(Options(values, "config.json")).kv_heads == heads


@pytest.mark.parametrize("case", BAD_FAMILIES)
def test_unsupported_options_of_families_are_named(case):
    family, values, message = BAD_FAMILIES[case]

    def read():
        options = Options(values, "config.json")
        family.config_from_hf(options)
        options.done()

    with pytest.raises(UserError, match=message) as e:
        read()
    assert "\n" not in str(e.value)


ROPES = {
    "llama": (llama.LLAMA, lambda rope: {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"} | rope}),
    "llama of transformers 4": (llama.LLAMA, lambda rope: {"rope_scaling": {"type": "linear", "factor": 2.0} | rope}),
    "gpt_neox": (neox.FAMILY, lambda rope: {"rope_parameters": rope}),
    "gemma3_text": (gemma.FAMILY, lambda rope: {"rope_parameters": {FULL: rope, LOCAL: rope}}),
}


@pytest.mark.parametrize("case", ROPES)
def test_rotary_options_can_be_accepted(case):
    """The option that the error suggests works. The context before scaling has no effect here, as in transformers."""
    family, values = ROPES[case]

    def read(*accept, **rope):
        options = Options(values(rope), "config.json", accept)
        model = family.config_from_hf(options)
        options.done()
        return model

    with pytest.raises(
        UserError, match=r"rope_parameters: unknown option beta_fast \(32\): .*--accept-option beta_fast"
    ):
        read(beta_fast=32)
    assert read("beta_fast", beta_fast=32) == read() == read(original_max_position_embeddings=512)


def test_rope_settings_of_both_versions():
    values = llama.LLAMA.config_to_hf(replace(LLAMA, rope_theta=5e5, rope_factor=8.0))
    old = {k: v for k, v in values.items() if k != "rope_parameters"}
    new = {k: v for k, v in values.items() if k not in ("rope_theta", "rope_scaling")}
    read = [llama.LLAMA.config_from_hf(Options(v, "config.json")) for v in (values, old, new)]
    assert read[0] == read[1] == read[2]
    assert (read[0].rope_theta, read[0].rope_factor) == (5e5, 8.0)


def test_multimodal_models_without_a_known_text_model_are_rejected(tmp_path):
    folder = hf_folder(tmp_path / "hf")
    for config, message in (
        ({"model_type": "gemma3"}, "a model of type gemma3 needs an object text_config"),
        ({"model_type": "gemma3", "text_config": 5}, "a model of type gemma3 needs an object text_config"),
        ({"model_type": "gemma3", "text_config": {"odd": 1}}, r"text_config: unknown option odd \(1\)"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "ministral"}},
            "model_type 'ministral' is not supported",
        ),
        (
            {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
            "model_type 'llama4' with the text model 'llama4_text' is not supported",
        ),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        refused(folder, tmp_path, message)


def wrapped_llama(path, outer, text=()):
    """Write a LLaVA directory with the text model of `hf_folder`."""
    folder = hf_folder(path, replace(LLAMA, tie_embeddings=False))
    own = json.loads((folder / "config.json").read_text())
    values = {"model_type": "llava", "text_config": own | dict(text), "vision_config": {}} | outer
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language_model.{name}": x for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def test_options_of_a_multimodal_model_do_not_reach_its_text_model(tmp_path):
    """The outer model may have options of the same names: transformers reads the text model's, or their defaults."""
    missing = {"rms_norm_eps": None, "rope_theta": None, "rope_parameters": None, "hidden_act": None, "head_dim": None}
    outer = {
        "rms_norm_eps": 0.01,
        "rope_theta": 77.0,
        "hidden_act": "relu",
        "head_dim": 2,
        "max_position_embeddings": 3,
    }
    plain = open_model(wrapped_llama(tmp_path / "a", {}, missing)).config
    assert (plain.norm_eps, plain.rope_theta, plain.activation, plain.head_width) == (1e-6, 1e4, "silu", 4)
    assert open_model(wrapped_llama(tmp_path / "b", outer, missing)).config == plain
    # The config.json of LLaVA 1.5 has these options.
    assert open_model(wrapped_llama(tmp_path / "c", {"ignore_index": -100, "vocab_size": 300}, missing)).config == plain


def test_unknown_options_of_a_multimodal_model_are_named(tmp_path):
    folder = wrapped_llama(tmp_path / "hf", {"logit_scale": 2.0})
    refused(folder, tmp_path, r"config\.json: unknown option logit_scale \(2\.0\)")
    import_model(folder, tmp_path / "run2", accept=("logit_scale",))


def test_ids_of_special_tokens_of_a_text_model_are_read(tmp_path):
    cases = (({}, 7), ({"eos_token_id": None}, 7), ({"eos_token_id": 5}, 5))
    for n, (outer, eos) in enumerate(cases):
        import_model(wrapped_llama(tmp_path / f"hf{n}", outer, {"eos_token_id": 7}), tmp_path / f"run{n}")
        assert jaxgpt.load(tmp_path / f"run{n}").tokenizer.eos_id == eos


def test_a_path_may_contain_two_dots(tmp_path):
    folder = hf_folder(tmp_path / "hf")
    (tmp_path / "deep").mkdir()
    import_model(folder, tmp_path / "deep" / ".." / "run")
    assert jaxgpt.load(tmp_path / "run").config.preset == "imported"


def test_a_prefix_of_every_tensor_is_found(tmp_path):
    folder = hf_folder(tmp_path / "hf", replace(LLAMA, tie_embeddings=False))
    import_model(folder, tmp_path / "a")
    for n, prefix in enumerate(("", "_orig_mod.model.", "module.model.", "model.model.")):
        tensors = load_file(folder / "model.safetensors")
        other = tmp_path / f"hf{n}"
        shutil.copytree(folder, other)
        named = {
            name.replace("model.", prefix) if name.startswith("model.") else name: x for name, x in tensors.items()
        }
        assert named.keys() != tensors.keys()
        save_file(named, other / "model.safetensors")
        import_model(other, tmp_path / f"run{n}")
        params = [flatten_params(jaxgpt.load(tmp_path / run).params) for run in ("a", f"run{n}")]
        for path in params[0]:
            np.testing.assert_array_equal(params[0][path], params[1][path])


def test_bad_files(tmp_path):
    folder = hf_folder(tmp_path / "cut")
    data = (folder / "model.safetensors").read_bytes()
    for length in (0, 5, 100, len(data) - 1):
        (folder / "model.safetensors").write_bytes(data[:length])
        refused(folder, tmp_path, "truncated")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("gone")
    refused(folder, tmp_path, "model.safetensors is a link to a missing file, gone: download")
    (folder / "model.safetensors").unlink()
    refused(folder, tmp_path, "no weights")
    for name in ("pytorch_model.bin", "ckpt.pt"):
        (folder / name).write_bytes(b"\x80\x04")
        refused(folder, tmp_path, "pickle.*safetensors")
        (folder / name).unlink()
    (folder / "config.json").write_text("{")
    refused(folder, tmp_path, "not valid JSON")
    refused(tmp_path / "nowhere", tmp_path, "is not a directory")


def test_shards_with_the_same_tensor(tmp_path):
    folder = hf_folder(tmp_path / "hf")
    shard(folder)
    save_file({"transformer.wte.weight": np.ones((300, 8), np.float32)}, folder / "model-3-of-3.safetensors")
    refused(folder, tmp_path, r"wte\.weight is in both")


def indexed(folder):
    """Split the weights of a directory into shards with an index."""
    shard(folder)
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_files_that_the_index_does_not_list_are_not_read(tmp_path):
    folder = hf_folder(tmp_path / "hf")
    import_model(folder, tmp_path / "a")
    indexed(folder)
    save_file({"transformer.wte.weight": np.ones((300, 8), np.float32)}, folder / "old.safetensors")
    import_model(folder, tmp_path / "b")
    params = [flatten_params(jaxgpt.load(tmp_path / run).params) for run in "ab"]
    for path in params[0]:
        np.testing.assert_array_equal(params[0][path], params[1][path])


def test_a_missing_shard_is_named(tmp_path):
    folder = hf_folder(tmp_path / "hf")
    indexed(folder)
    (folder / "model-2-of-2.safetensors").unlink()
    refused(folder, tmp_path, r"model-2-of-2\.safetensors is missing: .*index\.json lists it; download")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    refused(folder, tmp_path, r"index\.json: expected an object weight_map")


def test_a_missing_and_a_damaged_tokenizer_have_their_own_messages(tmp_path):
    folder = hf_folder(tmp_path / "hf")
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(
        UserError, match=r"hf has no tokenizer\.json: write it with .* choose a tokenizer with --tokenizer"
    ):
        import_model(folder, tmp_path / "run")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json.*; choose a tokenizer with --tokenizer"):
        import_model(folder, tmp_path / "run")


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    hf_folder(tmp_path / "hf", SMALL)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("jaxgpt.checkpoint.stream._write_array", fail)
    with pytest.raises(TrainingFailed) as error:
        import_model(tmp_path / "hf", tmp_path / "run")
    reason = "No space left on device; free space on its file system"
    assert str(error.value) == f"cannot write the run to {tmp_path / 'run'}: {reason}"
    assert not (tmp_path / "run").exists()


def test_existing_files_are_not_overwritten(tmp_path):
    folder = hf_folder(tmp_path / "hf")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").touch()
    with pytest.raises(UserError, match="already exists"):
        import_model(folder, tmp_path / "run")
    assert (tmp_path / "run" / "precious").exists()


@pytest.mark.parametrize("name", [*FAMILIES, "nanogpt"])
def test_weight_tables_are_invertible(name):
    """Splitting a tensor into leaves and joining them is the identity."""
    config = OF_FAMILIES.get(name, replace(SMALL, tie_embeddings=False))
    forms = {
        "nanogpt": gpt2.NANOGPT,
        "gemma3_text": gemma.form_of({"query_pre_attn_scalar": 24}, config),
    }
    form = forms.get(name) or FAMILIES[name].form
    tensors = tensors_of(form.table, config)
    shapes = leaf_shapes(config)
    leaves = {}
    for row in expand(form.table, config):
        mine = to_leaves(row, tensors[row.name], shapes)
        rounding = 1e-6 if row.layout.offset or row.layout.factor != 1.0 else 0.0
        np.testing.assert_allclose(to_tensor(row, mine), tensors[row.name], atol=rounding, rtol=0)
        leaves |= mine
    assert leaves.keys() == shapes.keys()


MEMORY = """
import json, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[2])
from folders import hf_folder
from jaxgpt.config import ModelConfig
from jaxgpt.convert.import_model import import_model

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

here = Path(sys.argv[1])
import_model(hf_folder(here / "small"), here / "warm")
config = ModelConfig(vocab_size=80000, block_size=256, n_layer=12, n_head=8, n_embd=512)
folder = hf_folder(here / "big", config)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kilobytes("VmRSS")
import_model(folder, here / "run")
size = (folder / "model.safetensors").stat().st_size / 1024
print((kilobytes("VmHWM") - before) / size)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory(tmp_path):
    """Importing 316 MB, half of it one tensor, needs memory for this tensor twice: memory-mapped, and as an array."""
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path, Path(__file__).parents[1]], capture_output=True, text=True, check=True
    )
    assert float(out.stdout.splitlines()[-1]) < 1.2


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_a_family_with_experts_needs_experts(name, tmp_path):
    family = FAMILIES[name]
    source = hf_folder(tmp_path / "hf", OF_FAMILIES[name], family=family)
    values = json.loads((source / "config.json").read_text())
    values |= {option: 0 for option in ("num_experts", "num_local_experts") if option in values}
    (source / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="experts 0 is not supported: it must be at least 1"):
        import_model(source, tmp_path / "run")


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_options_have_the_defaults_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    options = transformers.AutoConfig.for_model(name).to_dict()
    family = FAMILIES[name]
    explicit = family.config_from_hf(Options(options, "config.json"))
    assert canonical(family.config_from_hf(Options({}, "config.json"))) == canonical(explicit)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_losses_of_a_router_are_no_part_of_a_model(name):
    family = FAMILIES[name]
    trained = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    options = Options(trained, "config.json")
    assert family.config_from_hf(options) == family.config_from_hf(Options({}, "config.json"))
    options.done()


def test_added_tokens_beyond_the_model_are_left_out(tmp_path):
    """The tokenizers of Gemma 3's text models have an image token without an embedding."""
    model = replace(OF_FAMILIES["gemma3_text"], vocab_size=266)
    source = hf_folder(tmp_path / "hf", model, family=gemma.FAMILY)
    words = llama_tokenizer(("<end_of_turn>", "<image_soft_token>"))
    assert [token["id"] for token in words["added_tokens"]][-2:] == [265, 266]
    (source / "tokenizer.json").write_text(json.dumps(words))
    (source / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<image_soft_token>"}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [266, 265], "pad_token_id": 266}))
    done = import_model(source, tmp_path / "run")
    said = "the embedding has no rows for 1 token of the tokenizer, so the names are ordinary text: <image_soft_token>"
    assert done.note == said
    tokenizer = jaxgpt.load(tmp_path / "run").tokenizer
    assert tokenizer.special.end_ids == (265,)
    assert tokenizer.special.generation["pad_token_id"] is None
    assert "mask_token" not in tokenizer.special.names
    assert tokenizer.vocab_size == 266
    assert tokenizer.encode_special("<end_of_turn>").tolist()[-1] == 265
    assert max(tokenizer.encode_special("<image_soft_token>")) < 265
    words["model"]["vocab"] |= {f"w{i}": 266 + i for i in range(3)}  # these are not added tokens
    (source / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(UserError, match="the tokenizer has 269 ids, but the model only 266"):
        import_model(source, tmp_path / "other")
