"""Chat templates of exported models: the run's variables are defaults in transformers and in llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import SPM, V
from test_chat import TEMPLATE, VARIABLE, talker

import jaxgpt
from jaxgpt.config import Config, DataConfig
from jaxgpt.convert import export_model as export_module
from jaxgpt.convert import probes
from jaxgpt.convert.export_model import export_model
from jaxgpt.convert.exported_tokens import exported_special_tokens
from jaxgpt.convert.gguf import describe as gguf_describe
from jaxgpt.convert.gguf.tokenizer import read_tokenizer
from jaxgpt.convert.templates import with_default_variables
from jaxgpt.data.chat.encoding import chat_format
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.lm import LM

HI = [{"role": "user", "content": "Hi"}]
THINK = TEMPLATE.replace(
    "assistant\n'", "assistant\n' + ('' if enable_thinking | default(true) else '<think>\n\n</think>\n\n')"
)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the comparison of logits, which compiles two models."""
    monkeypatch.setattr(export_module, "probe_logits", lambda config, params: np.zeros(3))
    monkeypatch.setattr(probes, "probe_logits", lambda config, params: np.zeros(3))


def tuned(template: Any, variables: str, **names: str) -> LM:
    """A model whose run has variables of its chat template."""
    lm = talker(32, end=True)
    tokenizer = SubwordTokenizer(lm.tokenizer.library)  # type: ignore[attr-defined]
    tokenizer.special = SpecialTokens(lm.tokenizer.special.generation, {"chat_template": template} | names)
    data = DataConfig(dataset="none", chat_template_kwargs=variables)
    return lm._replace(tokenizer=tokenizer, config=replace(lm.config, data=data))


def exported(lm: LM, directory: Path) -> Any:
    """Export a model; return its tokenizer in transformers."""
    transformers = pytest.importorskip("transformers")
    jaxgpt.save(lm, directory / "run")
    export_model(directory / "run", directory / "out")
    return transformers.AutoTokenizer.from_pretrained(directory / "out")


def prompt(lm: LM, **given: Any) -> list[int]:
    """The ids that chat sends."""
    return jaxgpt.lm.Chat(lm, **given)._format.prompt_ids(HI)


CASES = [
    (THINK, '{"enable_thinking": false}'),
    (VARIABLE, '{"think": false}'),
    (TEMPLATE + "{{ x }}", '{"x": {"a": [null, true, -1e-05, "%} {{ \\" \\n \\u00e9 \\ud83d\\udc4b"]}}'),
    ("\n  {% if true %}{{ x }}{% endif %}{% macro f() %}{{ x }}{% endmacro %}{{ f() }}" + TEMPLATE, '{"x": 1}'),
    (TEMPLATE + "{{ documents[0].text }}", '{"documents": [{"title": "a", "text": "b"}]}'),
    (TEMPLATE + "{{ eos_token }}", '{"eos_token": "!"}'),
]


@pytest.mark.parametrize(("template", "variables"), CASES)
def test_transformers_renders_the_prompt_of_the_run_by_default(template: str, variables: str, tmp_path: Path) -> None:
    lm = tuned(template, variables)
    theirs = exported(lm, tmp_path)
    ids = theirs.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
    assert ids == prompt(lm)


def test_a_caller_of_transformers_overrides_the_default(tmp_path: Path) -> None:
    lm = tuned(THINK, '{"enable_thinking": false}')
    theirs = exported(lm, tmp_path)
    given = {"enable_thinking": True}
    ids = theirs.apply_chat_template(HI, add_generation_prompt=True, return_dict=False, **given)
    assert ids == prompt(lm, chat_template_kwargs=given)


def test_templates_with_names_have_the_default(tmp_path: Path) -> None:
    templates = [{"name": name, "template": name + THINK} for name in ("default", "rag")]
    theirs = exported(tuned(templates, '{"enable_thinking": false}'), tmp_path)
    for name in ("default", "rag"):
        text = theirs.apply_chat_template(HI, chat_template=name, add_generation_prompt=True, tokenize=False)
        assert text == ChatTemplate(name + THINK, {"enable_thinking": False}).render(HI).text


@pytest.mark.parametrize("template", [TEMPLATE, "{% if %}", TEMPLATE + "{{ eos_token }}"])
def test_a_template_that_does_not_read_a_variable_is_unchanged(template: str) -> None:
    special = SpecialTokens({}, {"chat_template": template})
    assert with_default_variables(special, {"enable_thinking": False, "not a name": 1}).chat_template == template


def test_a_model_without_a_template_has_no_default() -> None:
    special = SpecialTokens({}, {"bos_token": "<s>"})
    assert with_default_variables(special, {"enable_thinking": False}) == special


@pytest.mark.parametrize(("template", "variables"), CASES)
def test_llama_cpp_renders_the_prompt_of_the_run_by_default(template: str, variables: str) -> None:
    """llama.cpp sets the tokens that begin and end a text, and enable_thinking to true."""
    tokenizer = read_tokenizer(SPM, "m.gguf")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer.special = SpecialTokens({"bos_token_id": 1, "eos_token_id": 2}, {"chat_template": template} | tokens)
    data = DataConfig(dataset="none", chat_template_kwargs=variables)
    form = chat_format(tokenizer, data)
    assert form is not None
    tokenizer.special = exported_special_tokens(tokenizer, Config(data=data), gguf_describe.ALWAYS)
    metadata = gguf_describe.describe_tokenizer(tokenizer, V).metadata
    names = {f"{name}_token": metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    given = {name: metadata["tokenizer.ggml.tokens"][i] for name, i in names.items()}
    written = ChatTemplate(metadata["tokenizer.chat_template"], given | {"enable_thinking": True})
    assert written.render(HI) == form.template.render(HI)
