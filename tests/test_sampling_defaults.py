"""Sampling settings of generation_config.json: defaults of every way to generate, unless a setting is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_chat import HI, talker

import jaxgpt
from jaxgpt.cli import main
from jaxgpt.config import SamplingParams
from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.lm.defaults import sampling_defaults

RECOMMENDED = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 5,
    "top_p": 0.7,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
}
SETTINGS = {name: value for name, value in RECOMMENDED.items() if name != "do_sample"}
N = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def plain() -> LM:
    return talker(64, end=False)


def recommending(lm: LM, **generation: Any) -> LM:
    """Return the model with settings in its generation_config.json."""
    again = talker(64, end=False).tokenizer
    again.special = replace(again.special, generation=generation)
    return lm._replace(tokenizer=again)


def last(pieces: Any) -> Any:
    *_, end = pieces
    return end.done


def test_every_way_to_generate_uses_them(plain: LM) -> None:
    model = recommending(plain, **RECOMMENDED)
    assert jaxgpt.generate(model, "ab", **N) == jaxgpt.generate(plain, "ab", **N, **SETTINGS)
    assert jaxgpt.generate(model, "ab", **N) != jaxgpt.generate(plain, "ab", **N)
    assert last(jaxgpt.stream(model, "ab", **N)) == jaxgpt.generate(plain, "ab", **N, **SETTINGS)[0]
    assert jaxgpt.chat(model, HI, **N) == jaxgpt.chat(plain, HI, **N, **SETTINGS)
    names = [stage.name for stage in jaxgpt.explain(model, "ab").stages]
    assert names == [stage.name for stage in jaxgpt.explain(plain, "ab", **SETTINGS).stages]
    [wanted] = jaxgpt.generate(plain, "ab", **N, **SETTINGS)
    assert jaxgpt.study.generate(model, "ab", **N).generation.ids == wanted.ids


def test_a_given_setting_wins_and_all_settings_ignore_the_file(plain: LM) -> None:
    model = recommending(plain, **RECOMMENDED)
    assert jaxgpt.generate(model, "ab", **N, top_k=2) == jaxgpt.generate(plain, "ab", **N, **SETTINGS | {"top_k": 2})
    own = vars(SamplingParams())
    assert jaxgpt.generate(model, "ab", **N, **own) == jaxgpt.generate(plain, "ab", **N)


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "top_k": 5}, {"temperature": -1}])
def test_do_sample_false_is_greedy(plain: LM, more: dict[str, Any]) -> None:
    model = recommending(plain, do_sample=False, **more)
    assert sampling_defaults(model.tokenizer).values["temperature"] == 0
    if not more:
        assert jaxgpt.generate(model, "ab", **N) == jaxgpt.generate(plain, "ab", **N, temperature=0)


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": 3, "max_new_tokens": 9, "do_sample": True, "top_k": None}])
def test_a_file_without_sampling_settings_changes_nothing(plain: LM, generation: dict[str, Any]) -> None:
    found = sampling_defaults(recommending(plain, **generation).tokenizer)
    assert found == ({}, {})
    assert found.note(()) == ""


def test_beam_search_uses_the_penalty_and_drops_settings_that_it_rejects(plain: LM) -> None:
    model = recommending(plain, **RECOMMENDED)
    beams = {"num_beams": 2, "max_new_tokens": 5}
    assert jaxgpt.generate(model, "ab", **beams) == jaxgpt.generate(plain, "ab", **beams, repetition_penalty=1.3)
    with pytest.raises(UserError, match=r"temperature 0.3 has no effect in beam search"):
        jaxgpt.generate(model, "ab", **beams, temperature=0.3)


BAD = {
    "a string": ({"temperature": "hot"}, "temperature 'hot' (temperature must be a number, not 'hot')"),
    "too small": ({"top_k": -1}, "top_k -1 (top_k must be at least 0, not -1)"),
    "too large": ({"top_p": 1.5}, "top_p 1.5 (top_p must be at least 0 and at most 1, not 1.5)"),
    "zero": ({"repetition_penalty": 0}, "repetition_penalty 0 (repetition_penalty must be above 0, not 0)"),
    "a boolean": ({"min_p": True}, "min_p True (min_p must be a number, not True)"),
    "a list": ({"top_k": [5]}, "top_k [5] (top_k must be an integer, not [5])"),
    "do_sample": ({"do_sample": "no"}, "do_sample 'no' (do_sample must be true or false)"),
    "without an equivalent": ({"typical_p": 0.9}, "typical_p 0.9 (not supported)"),
    "an end": ({"stop_strings": ["###"]}, "stop_strings ['###'] (not supported)"),
    "a forced token": ({"forced_eos_token_id": 2}, "forced_eos_token_id 2 (not supported)"),
    "beams": ({"num_beams": 4}, "num_beams 4 (not supported)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_used_is_one_line(case: str, plain: LM) -> None:
    generation, message = BAD[case]
    found = sampling_defaults(recommending(plain, **generation).tokenizer)
    assert found.values == {}
    assert found.note(()) == f"not used from generation_config.json: {message}"
    assert found.note(generation) == ""


@pytest.mark.parametrize("value", [1, 1.0, 0, None])
def test_values_without_an_effect_are_not_mentioned(plain: LM, value: Any) -> None:
    names = ("typical_p", "num_beams") if value else ("epsilon_cutoff", "penalty_alpha", "min_length")
    assert sampling_defaults(recommending(plain, **dict.fromkeys(names, value)).tokenizer) == ({}, {})


def test_the_note_lists_the_settings_in_use(plain: LM) -> None:
    found = sampling_defaults(recommending(plain, temperature=0.1, top_p=0.5, top_k=0, typical_p=0.9).tokenizer)
    used = "sampling: temperature 0.1, top_p 0.5 from generation_config.json"
    assert found.note(()) == f"{used}; not used from generation_config.json: typical_p 0.9 (not supported)"
    assert found.note({"temperature", "typical_p"}) == "sampling: top_p 0.5 from generation_config.json"


@pytest.mark.parametrize("command", ["sample", "chat", "explain"])
def test_commands_use_and_print_them(
    command: str, plain: LM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jaxgpt.save(recommending(plain, **RECOMMENDED), tmp_path / "run")
    text = {"sample": ["--prompt", "ab"], "chat": ["--once", "ab"], "explain": ["--prompt", "ab"]}[command]
    length = [] if command == "explain" else ["--max-new-tokens", "4"]
    assert main([command, str(tmp_path / "run"), *text, *length, "--json"]) == 0
    used = capsys.readouterr()
    settings = "temperature 0.3, top_k 5, top_p 0.7, min_p 0.01, repetition_penalty 1.3"
    assert f"jaxgpt: sampling: {settings} from generation_config.json" in used.err.splitlines()

    given = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main([command, str(tmp_path / "run"), *text, *length, *given, "--json"]) == 0
    same = capsys.readouterr()
    assert json.loads(same.out) == json.loads(used.out)
    assert "generation_config.json" not in same.err


@pytest.mark.parametrize("command", ["sample", "chat", "explain"])
@pytest.mark.parametrize(("option", "value"), [("--top-p", "2"), ("--top-k", "-1"), ("--repetition-penalty", "0")])
def test_wrong_options_are_one_line(
    command: str, option: str, value: str, plain: LM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jaxgpt.save(plain, tmp_path / "run")
    assert main([command, str(tmp_path / "run"), f"{option}={value}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxgpt: {option.strip('-').replace('-', '_')} must be")
