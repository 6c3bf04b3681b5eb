"""Presets: each can be built, has the published size, and states only recorded results."""

from __future__ import annotations

import re

import pytest
from helpers import jaxgpt, repository

from jaxgpt.cli.info import describe as figures
from jaxgpt.cli.settings import with_vocab
from jaxgpt.config import Config
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.lm import LM
from jaxgpt.model.params import abstract_params
from jaxgpt.presets import PRESETS, command, preset
from jaxgpt.study import names
from jaxgpt.study.run import hidden_names, layer_names

LARGE = ("gpt2-medium", "gpt2-large", "gpt2-xl")  # larger versions of gpt2, slow to trace


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LARGE)) for name in PRESETS])
def test_every_preset_can_be_built(name: str) -> None:
    config = with_vocab(preset(name))
    found = figures(config)
    assert found["parameters"] == config.model.parameters > 0
    assert found["bytes"]["parameters"] == 4 * found["parameters"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("statquest", 37),
        ("numpy-minimal", 96 * 64 + 2 * (3 * 64 * 64 + 2 * 64 * 128)),
        ("nanogpt-cpu", 804_096),
        ("nanogpt-gpu", 10_745_088),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt2-style", 124_439_808 + 50_257 * 768 + 50_257),  # the head is untied and has a bias
    ],
)
def test_parameters_of_published_models(name: str, parameters: int) -> None:
    assert with_vocab(preset(name)).model.parameters == parameters


@pytest.mark.parametrize(
    ("name", "D", "F", "N", "L", "T"),
    [
        ("numpy-minimal", 64, 128, 1, 2, 64),
        ("torch-decoder", 512, 2048, 8, 6, 512),
        ("gpt2-style", 768, 3072, 12, 12, 1024),
    ],
)
def test_sizes_and_shapes_of_the_study_notes(name: str, D: int, F: int, N: int, L: int, T: int) -> None:
    """Logits, hidden states and attention maps at full size, without allocating them."""
    config = with_vocab(preset(name)).model
    params = abstract_params(config)
    assert params["h_0"]["mlp"]["up_proj"]["kernel"].shape == (D, F)
    assert config.block_size == T
    listed = names(LM(Config(model=config), params, ByteTokenizer()), (2, T))
    shapes = {key: x.shape for key, x in listed.items()}
    hidden, patterns = hidden_names(config), layer_names(config, "attn.pattern")
    assert shapes["logits"] == (2, T, 50_257 if name == "gpt2-style" else 96)
    assert [shapes[h] for h in hidden] == [(2, T, D)] * (L + 1)
    assert [shapes[p] for p in patterns] == [(2, N, T, T)] * L


RESULTS = dict(
    re.findall(r"^\| `(jaxgpt train .*?)` \| (.*) \|$", (repository() / "docs/performance.md").read_text(), re.M)
)


def test_the_size_of_finetune_is_that_of_its_base() -> None:
    listed = {row["name"]: row["parameters"] for row in jaxgpt("presets", "--json").json["presets"]}
    assert list(listed) == list(PRESETS)
    assert [name for name, size in listed.items() if size is None] == ["finetune"]
    out = jaxgpt("presets").out
    assert "finetune  (parameters of the run that --init-from names)" in out
    assert "gpt2  (124,439,808 parameters)" in out


@pytest.mark.parametrize("name", PRESETS)
def test_expected_results_were_recorded(name: str) -> None:
    """Recorded in docs/performance.md, or by the named source."""
    expect = PRESETS[name].expect
    if not expect:
        return
    if command(name) not in RESULTS:
        assert "nanoGPT" in expect
        return
    parameters, recorded, _ = RESULTS[command(name)].split(" | ")
    assert int(parameters.replace(",", "")) == with_vocab(preset(name)).model.parameters
    [loss] = re.findall(r"loss (\d\.\d+)", expect)
    [record] = re.findall(r"^(\d\.\d+)", recorded)
    assert round(float(record), 2) == float(loss)
