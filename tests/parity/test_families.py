"""Each family equals transformers: logits, gradients, greedy texts, and the files after import and export."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxgpt
from jaxgpt.config import Config
from jaxgpt.convert.models import read_model
from jaxgpt.data.tokenizer_files import make_tokenizer

pytest.importorskip("torch")
pytest.importorskip("transformers")

from parity.families import CASES, NEW, VARIANTS, Measured, measure

ALL = CASES | VARIANTS
# The others differ less from these, or from the families in test_transformers.py.
# A model may be exported as a different family that also expresses it; a factor of scores moves into a gain.
REWRITTEN = ("mistral-global", "gemma3-other")
SHORT = ("qwen2", "gpt_neox", "gemma3_text", "olmo2")


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


def test_capture(tmp_path: Path) -> None:
    """Hidden states and attention maps of a local and a global layer, with norms around both sublayers."""
    torch = pytest.importorskip("torch")
    theirs = VARIANTS["gemma3-other"].build()
    theirs.save_pretrained(tmp_path / "hf")
    config, params, _ = read_model(tmp_path / "hf")
    ids_BT = np.random.default_rng(2).integers(0, config.vocab_size, (2, 20))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids_BT), output_hidden_states=True, output_attentions=True)
    with jax.default_matmul_precision("highest"):
        found = jaxgpt.study.capture(
            jaxgpt.LM(Config(model=config), params, make_tokenizer("ids", "", 0, config.vocab_size)), ids_BT
        )
    assert config.window_pattern == "LGG"
    assert (np.asarray(found.attentions[0])[:, :, 10, 0] == 0).all()
    assert (np.asarray(found.attentions[1])[:, :, 10, 0] > 0).all()
    for mine, other in zip(
        (*found.hidden, *found.attentions), (*expected.hidden_states, *expected.attentions), strict=True
    ):
        assert np.abs(np.asarray(mine) - other.numpy()).max() < 2e-5
