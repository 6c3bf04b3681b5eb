"""Presets: each can be built, has the published size, and states only recorded results."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import repository

from jaxgpt.cli.info import describe as figures
from jaxgpt.cli.info import with_vocab
from jaxgpt.model import GPT
from jaxgpt.model.params import abstract_params
from jaxgpt.presets import PRESETS, describe, preset

LARGE = ("gpt2-medium", "gpt2-large", "gpt2-xl")  # larger versions of gpt2, whose layers take long to trace


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
    forward = functools.partial(GPT(config).apply, mutable="intermediates")
    logits, sown = jax.eval_shape(forward, {"params": params}, jax.ShapeDtypeStruct((2, T), jnp.int32))
    sown = sown["intermediates"]
    assert logits.shape == (2, T, 50_257 if name == "gpt2-style" else 96)
    assert [h.shape for h in sown["hidden"]] == [(2, T, D)] * (L + 1)
    assert [sown[f"h_{i}"]["attn"]["attention"][0].shape for i in range(L)] == [(2, N, T, T)] * L


RESULTS = dict(
    re.findall(r"^\| `(python train\.py.*?)` \| (.*) \|$", (repository() / "docs/performance.md").read_text(), re.M)
)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_a_command_and_a_recorded_result(name: str) -> None:
    """Recorded in docs/performance.md, or by the named source."""
    said = describe(name)
    assert said.command.startswith("python train.py")
    if said.expect is None:
        return
    if said.command not in RESULTS:
        assert "nanoGPT" in said.expect
        return
    parameters, recorded, _ = RESULTS[said.command].split(" | ")
    assert int(parameters.replace(",", "")) == with_vocab(preset(name)).model.parameters
    [loss] = re.findall(r"loss (\d\.\d+)", said.expect)
    [record] = re.findall(r"^(\d\.\d+)", recorded)
    assert round(float(record), 2) == float(loss)
