"""Presets: each can be built, has the published size, and states only recorded results."""

from __future__ import annotations

import re

import pytest
from helpers import jaxgpt, repository

from jaxgpt.cli.settings import with_vocab
from jaxgpt.counts import model_counts as figures
from jaxgpt.errors import UserError
from jaxgpt.model.params import count_parameters
from jaxgpt.presets import PRESETS, command, preset

LARGE = ("gpt2-medium", "gpt2-large", "gpt2-xl")  # larger versions of gpt2, slow to trace


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LARGE)) for name in PRESETS])
def test_every_preset_can_be_built(name: str) -> None:
    config = with_vocab(preset(name))
    found = figures(config)
    assert found["parameters"] == count_parameters(config.model) > 0
    assert found["bytes"]["parameters"] == 4 * found["parameters"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("statquest", 37),
        ("numpy-minimal", 96 * 64 + 2 * (3 * 64 * 64 + 2 * 64 * 128)),
        ("torch-decoder", 2 * 96 * 512 + 96 + 6 * (4 * 512 * 513 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512) + 2 * 512),
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
    assert count_parameters(with_vocab(preset(name)).model) == parameters


RESULTS = dict(
    re.findall(r"^\| `(jaxgpt train .*?)` \| (.*) \|$", (repository() / "docs/performance.md").read_text(), re.M)
)


def test_the_size_of_finetune_is_that_of_its_base() -> None:
    listed = {row["name"]: row["parameters"] for row in jaxgpt("presets", "--json").json["presets"]}
    assert list(listed) == list(PRESETS)
    assert [name for name, size in listed.items() if size is None] == ["finetune"]
    out = jaxgpt("presets").out
    assert "finetune  (size of the --init-from model)" in out
    assert "gpt2  (124,439,808 parameters)" in out


@pytest.mark.parametrize("name", PRESETS)
def test_expected_results_were_recorded(name: str) -> None:
    """A result is recorded in docs/performance.md, or by the named source."""
    expect = PRESETS[name].expect
    if not expect:
        return
    if command(name) not in RESULTS:
        assert "nanoGPT" in expect
        return
    parameters, recorded, _ = RESULTS[command(name)].split(" | ")
    assert int(parameters.replace(",", "")) == count_parameters(with_vocab(preset(name)).model)
    [loss] = re.findall(r"loss (\d\.\d+)", expect)
    [record] = re.findall(r"^(\d\.\d+)", recorded)
    assert round(float(record), 2) == float(loss)


def test_an_unknown_preset_has_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"no preset 'shakspeare' \(did you mean shakespeare\?\): use one of"):
        preset("shakspeare")
