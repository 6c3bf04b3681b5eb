"""Each family equals transformers: logits, gradients, greedy texts, taps, and the files after import and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpt
from jaxgpt.config import Config
from jaxgpt.convert.open_model import read_model
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.model import GPT
from jaxgpt.ops.attention import document_positions

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from parity.families import CASES, GPT2, NEW, SMALL, VARIANTS, Case, Measured, V, compare, measure  # noqa: E402

ALL = CASES | VARIANTS
# The other cases, tested with --long, differ less from these cases or from the options below.
SHORT = ("qwen2", "gpt_neox", "gemma3_text", "olmo2", "mixtral")
# A model may be exported as a different family that also expresses it; a factor of scores moves into a gain.
REWRITTEN = ("mistral-global", "gemma3-other")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 24,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
OPTIONS = {
    "gpt2": Case("", "GPT2", GPT2),
    "gpt2-unscaled": Case("", "GPT2", GPT2 | {"scale_attn_weights": False}),
    "gpt2-by-layer": Case("", "GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-upcast": Case("", "GPT2", GPT2 | {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-inner-gelu": Case("", "GPT2", GPT2 | {"n_inner": 48, "activation_function": "gelu"}),
    "gpt2-relu-untied": Case("", "GPT2", GPT2 | {"activation_function": "relu", "tie_word_embeddings": False}),
    "gpt2-silu-eps": Case("", "GPT2", GPT2 | {"activation_function": "silu", "layer_norm_epsilon": 1e-2}),
    "llama": Case("", "Llama", SMALL),
    "llama-tied": Case("", "Llama", SMALL | {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-biases": Case("", "Llama", SMALL | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama3-rope": Case("", "Llama", SMALL | {"rope_parameters": LLAMA3, "head_dim": 16}),
    "yarn": Case("", "Llama", SMALL | {"rope_parameters": YARN, "head_dim": 16}),
    "yarn-attention": Case("", "Qwen3", SMALL | {"rope_parameters": YARN | {"attention_factor": 0.5}, "head_dim": 16}),
    "yarn-mscale": Case("", "Llama", SMALL | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}}),
    "qwen3": Case("", "Qwen3", SMALL | {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "qwen3-tied": Case("", "Qwen3", SMALL | {"head_dim": 8, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "qwen3-window": Case("", "Qwen3", SMALL | {"head_dim": 16} | WINDOW),
}


@pytest.fixture(scope="module", params=[n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in ALL])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    result = measure(ALL[request.param], tmp_path_factory.mktemp(request.param))
    return result._replace(weights=0.0, config=[]) if request.param in REWRITTEN else result


def test_logits(measured: Measured) -> None:
    assert measured.spread > 0.1  # the output is not constant
    assert measured.logits < 2e-5


def test_gradients(measured: Measured) -> None:
    assert measured.gradients < 1e-4


def test_greedy_texts(measured: Measured) -> None:
    assert measured.equal_tokens == measured.tokens == 2 * NEW


def test_import_and_export(measured: Measured) -> None:
    assert measured.exported < 2e-5
    assert measured.weights < 1e-6
    assert measured.config == []


def both(case: Case, folder: Path, seed: int = 0) -> tuple[Any, Any]:
    """Return a model in transformers, and its config, weights and table here."""
    theirs = case.build(seed)
    theirs.save_pretrained(folder / "hf")
    return theirs, read_model(folder / "hf")


@pytest.mark.parametrize(("seed", "length"), [(0, 5), (1, 80)])
@pytest.mark.parametrize("case", OPTIONS)
def test_logits_and_gradients_of_options(case: str, seed: int, length: int, tmp_path: Path) -> None:
    theirs, ours = both(OPTIONS[case], tmp_path, seed)
    logits, spread, gradients = compare(theirs, *ours, np.random.default_rng(seed).integers(0, V, (2, length)))
    assert spread > 0.1
    assert logits < 2e-5
    assert gradients < 1e-4


@pytest.mark.parametrize("case", ["gpt2", "llama3-rope", "qwen3-window", "gemma3-other"])
def test_capture(case: str, tmp_path: Path) -> None:
    """Compare hidden states and attention maps for one window, local and global layers, and norms around both sublayers."""
    theirs, (config, params, _) = both((OPTIONS | VARIANTS)[case], tmp_path)
    lm = jaxgpt.LM(Config(model=config), params, make_tokenizer("ids", "", 0, V))
    ids = np.random.default_rng(5).integers(0, V, (2, 17))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids), output_hidden_states=True, output_attentions=True)
    with jax.default_matmul_precision("highest"):
        found = jaxgpt.study.capture(lm, ids)
    pairs = zip((*found.hidden, *found.attentions), (*expected.hidden_states, *expected.attentions), strict=True)
    assert (len(found.hidden), len(found.attentions)) == (config.n_layer + 1, config.n_layer)
    for mine, other in pairs:
        assert np.abs(np.asarray(mine) - other.numpy()).max() < (2e-5 if case == "gemma3-other" else 1e-5)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_documents(case: str, tmp_path: Path) -> None:
    """Several documents in a row equal transformers with restarted positions and a block-diagonal mask."""
    theirs, (config, params, _) = both(OPTIONS[case], tmp_path)
    ids = np.random.default_rng(5).integers(0, V, (2, 17))
    sizes = (5, 1, 11), (8, 2, 7)
    documents = np.stack([np.repeat(range(3), row) for row in sizes])
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in sizes])
    allowed = np.tri(17, dtype=bool) & (documents[:, :, None] == documents[:, None, :])
    mask = torch.where(torch.tensor(allowed), 0.0, torch.finfo(torch.float32).min)[:, None]
    with torch.no_grad():
        given = {"attention_mask": mask, "position_ids": torch.tensor(positions)}
        expected = theirs(torch.tensor(ids), **given).logits.numpy()
        assert np.abs(theirs(torch.tensor(ids)).logits.numpy() - expected).max() > 0.1
    with jax.default_matmul_precision("highest"):
        packed = document_positions(jnp.asarray(documents, jnp.int32))
        np.testing.assert_array_equal(packed.position_BT, positions)
        run = jax.jit(lambda tokens, packed: GPT(config).apply({"params": params}, tokens, None, packed))
        out = np.asarray(run(jnp.asarray(ids, jnp.int32), packed))
    assert np.abs(out - expected).max() < 2e-5
