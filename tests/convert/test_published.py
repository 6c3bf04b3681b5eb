"""Every published config.json imports, or is rejected for a valid reason."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert.published import IMPORTED, PUBLISHED
from folders import LLAMA, SMALL, hf_folder

from jaxgpt.convert.open_model import open_model, read_model
from jaxgpt.convert.options import ACTIVATIONS
from jaxgpt.convert.read_weights import checked_names
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.params import count_parameters
from jaxgpt.ops import activations

V = 61


@pytest.fixture
def describe(tmp_path, monkeypatch):
    """Describe the model of a config.json at its published size, without a file of weights."""
    monkeypatch.setattr("jaxgpt.convert.open_model.open_safetensors", lambda path: None)

    def read(config, accept=()):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return open_model(tmp_path, accept).config

    return read


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(describe, name):
    config, parameters, refused, accept = PUBLISHED[name]
    if refused:
        with pytest.raises(UserError, match=refused) as e:
            describe(config)
        assert "\n" not in str(e.value)
    if parameters:
        assert count_parameters(describe(config, accept)) == parameters


def test_options_can_be_accepted(describe):
    config = PUBLISHED["openai-community/gpt2"].config
    assert describe(config | {"alibi": True, "attn_pdrop": 0.0}, ["alibi", "attn_pdrop"]).dropout == 0.1
    with pytest.raises(UserError, match="unknown option alibi"):
        describe(config | {"alibi": True}, ["alib"])


def shrunk(config):
    """Return the same config for two layers, small heads and few ids; every other key is unchanged."""
    kv = config.get("num_key_value_heads")
    heads = 6 if kv and config["num_attention_heads"] == 3 * kv else 4
    small = {
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_inner": 48,
        "n_positions": 24,
        "n_ctx": 24,
        "hidden_size": 8 * heads,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv and max(heads * kv // config["num_attention_heads"], 1),
        "head_dim": 16,
        "max_position_embeddings": 24,
        "vocab_size": V,
    }
    small = {key: value for key, value in small.items() if config.get(key) is not None}
    rope = config.get("rope_scaling")
    if rope and "rope_type" in rope:
        small["rope_scaling"] = rope | {"original_max_position_embeddings": 16}
    if "layer_types" in config:
        small["layer_types"] = config["layer_types"][:2]
    if "query_pre_attn_scalar" in config:
        small |= {"query_pre_attn_scalar": 16, "sliding_window": 7}
    if config.get("pad_token_id", 0) >= V:
        small["pad_token_id"] = 5
    return config | small


@functools.cache
def compiled(config):
    return jax.jit(lambda params, tokens: GPT(config).apply({"params": params}, tokens))


# The files tested with --long repeat these files with different sizes and metadata.
SHORT = ("AI-Sweden-Models/gpt-sw3-126m", "HuggingFaceTB/SmolLM2-135M-Instruct", "unsloth/Llama-3.2-1B-Instruct")


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in IMPORTED])
def test_logits_are_those_of_transformers(tmp_path, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    from parity.families import randomize

    config = shrunk(PUBLISHED[name].config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    # transformers rejects a published null in its classifier settings.
    known = {key: value for key, value in config.items() if value is not None or not key.startswith("summary_")}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(known))
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "theirs"),
        attn_implementation="eager",
        dtype=torch.float32,  # Gemma's embedding scale would be rounded to the dtype of the file
    ).eval()
    randomize(theirs)
    tensors = dict(theirs.named_parameters())  # without a tied head
    if config["model_type"] == "gpt_neox":
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    safetensors.save_file(tensors, tmp_path / "model.safetensors")

    model, params, _ = read_model(tmp_path)
    ids = np.random.default_rng(0).integers(0, V, (2, model.block_size))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    assert expected.std() > 0.1
    with jax.default_matmul_precision("highest"):
        out = np.asarray(compiled(model)(params, jnp.asarray(ids, jnp.int32)))
    assert np.abs(out - expected).max() < 2e-5


def test_activations_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.activations").ACT2FN
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    for name, mine in ACTIVATIONS.items():
        expected = theirs[name](torch.tensor(x)).numpy()
        assert np.abs(np.asarray(activations.ACTIVATIONS[mine](x)) - expected).max() < 1e-6, name


@pytest.mark.parametrize(("kind", "name"), [("gpt2", "GPT2Model"), ("llama", "LlamaModel")])
def test_a_model_without_its_tied_head(tmp_path, kind, name):
    folder = hf_folder(tmp_path / "hf", SMALL if kind == "gpt2" else replace(LLAMA, tie_embeddings=True))
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))
    assert checked_names(open_model(folder))
