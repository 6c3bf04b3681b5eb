"""The figure of a config: valid XML with the numbers of the model, and a different figure for each option."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers import every_model, small
from jaxgpt_course import architecture

from jaxgpt.config import ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.model.params import count_parameters
from jaxgpt.presets import preset

SVG = "{http://www.w3.org/2000/svg}"
TIMES = "\N{MULTIPLICATION SIGN}"
BOX = 224  # width of a sublayer's box


def texts(svg: str, style: str) -> list[str]:
    nodes = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return [str(node.text) for node in nodes if style in node.attrib["class"].split()]


def numbers(words: list[str]) -> list[int]:
    return [int(word.replace(",", "")) for word in words if re.fullmatch(r"[\d,]+", word)]


@every_model
def test_the_numbers_add_up_to_the_parameters_of_the_model(name: str) -> None:
    config = small(name, n_layer=3)
    right = texts(architecture(config), "n")
    begin, end = right.index(f"block, {TIMES} 3"), next(i for i, word in enumerate(right) if "=" in word)
    block, each, of_all = sum(numbers(right[begin:end])), *numbers(re.split(f" [{TIMES}=] ", right[end])[1:])
    assert (block, 3 * block) == (each, of_all)
    assert sum(numbers(right[:begin] + right[end:])) + of_all == count_parameters(config)
    assert right[-1] == f"{count_parameters(config):,} parameters"


def test_the_numbers_of_gpt2() -> None:
    config = preset("gpt2").with_model(vocab_size=50_257).model
    svg = architecture(config, 'GPT-2 <124M> & "friends"')
    assert numbers(texts(svg, "n")) == [
        38_597_376, 786_432, 1_536, 1_771_776, 590_592, 1_536, 2_362_368, 2_360_064, 1_536,
    ]  # fmt: skip
    assert texts(svg, "h") == ['GPT-2 <124M> & "friends"']
    root = ElementTree.fromstring(svg)
    label = 'GPT-2 <124M> & "friends": 12 blocks, 124,439,808 parameters'
    assert (root.attrib["role"], root.attrib["aria-label"], root[0].text) == ("img", label, label)
    assert not re.search(r"<script|href|url\(|#[0-9a-f]{3,6}[^;}0-9a-f]", svg), (
        "no link, and no color outside of the style"
    )
    assert svg == architecture(config, 'GPT-2 <124M> & "friends"')


@pytest.mark.parametrize(
    "option",
    [
        {"norm_position": "post"}, {"norm_position": "both"}, {"positions": "rope"}, {"positions": "sinusoidal"},
        {"mlp": "gated"}, {"activation": "relu"}, {"n_kv_head": 2}, {"tie_embeddings": False}, {"bias": False},
        {"norm": "rmsnorm"}, {"qk_norm": True}, {"sliding_window": 4}, {"parallel_residual": True}, {"dropout": 0.1},
        {"logit_softcap": 30.0}, {"embed_scale": True}, {"attn_proj": False}, {"final_norm": False},
    ],
    ids=str,
)  # fmt: skip
def test_each_option_is_drawn(option: dict[str, Any]) -> None:
    assert architecture(small("gpt2", **option)) != architecture(small("gpt2"))


def test_the_wires_of_each_norm_position() -> None:
    """Post-norm is on the residual stream, and wider than a sublayer's boxes; the other norms are in the branch."""
    for position, on_stream, in_branch in (("pre", 1, 2), ("post", 3, 0), ("output", 1, 2), ("both", 1, 4)):
        root = ElementTree.fromstring(architecture(small("gpt2", norm_position=position)))
        widths = [int(box.attrib["width"]) for box in root.iter(f"{SVG}rect") if "norm" in box.attrib["class"]]
        assert [sum(w > BOX for w in widths), sum(w == BOX for w in widths)] == [on_stream, in_branch]


def test_no_text_is_wider_than_its_box() -> None:
    """Labels of large models fit: at most 36 characters of 6 px."""
    wide = ModelConfig(
        vocab_size=262_144, block_size=131_072, n_layer=62, n_head=128, n_kv_head=16, n_embd=16_384, n_inner=53_248,
        head_dim=128, positions="rope", rope_theta=1e6, rope_local_theta=1e4, rope_factor=8.0, rope_fraction=0.5,
        norm="rmsnorm", norm_position="both", qk_norm=True, mlp="gated", activation="gelu_new", embed_scale=True,
        sliding_window=1024, window_pattern="LLLLLG", scale_attn_by_inverse_layer_idx=True,
    )  # fmt: skip
    for config in (wide, replace(wide, mlp="plain", n_kv_head=0)):
        svg = architecture(config)
        assert max(map(len, texts(svg, "d"))) <= 36
        assert max(map(len, texts(svg, "t")), default=0) <= 43, "the line of all blocks"


def test_a_vocabulary_is_needed() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size is 0"):
        architecture(ModelConfig())
