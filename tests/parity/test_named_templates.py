"""Chat templates with names: conversations with tools use tool_use, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_tool_calls import ARGUMENTS, NAMES, ONLY_CALLS, QWEN, TOOLS, conversation, tokenizer
from tokenizers import Tokenizer as HFTokenizer

from jaxgpt.config import Config, DataConfig, ModelConfig
from jaxgpt.data.chat.encoding import chat_format, stop_ids
from jaxgpt.data.conversations import load_conversations
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.files import load_tokenizer, save_tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

TALK = conversation(ARGUMENTS)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant: {% endif %}"
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": QWEN}]


def named(templates: Any = NAMED) -> SubwordTokenizer:
    """A tokenizer of bytes with named templates."""
    own = tokenizer()
    own.special = SpecialTokens({"eos_token_id": own.library.token_to_id("</s>")}, NAMES | {"chat_template": templates})
    return own


def load(path: Path, own: Tokenizer) -> str:
    """Return the training text of a file of conversations."""
    data = DataConfig(path=str(path), tokenizer="byte", train_fraction=1.0)
    loaded = load_conversations(Config(model=ModelConfig(block_size=2048), data=data), own)
    [ids] = loaded.train.tokens.parts
    return own.decode(ids)


def theirs(own: SubwordTokenizer, messages: Any, tools: Any) -> list[int]:
    transformers = pytest.importorskip("transformers")
    library = HFTokenizer.from_str(own.to_json())
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=library, chat_template=own.special.templates)
    ids: list[int] = made.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    return ids


def prompt(own: SubwordTokenizer, messages: Any, tools: Any) -> list[int]:
    """The ids that chat sends."""
    form = chat_format(own, DataConfig(), with_tools=tools is not None)
    assert form is not None
    return form.prompt_ids(messages, tools)


@pytest.mark.parametrize("tools", [TOOLS, [], None])
def test_chat_uses_the_template_that_transformers_uses(tools: Any) -> None:
    own = named()
    messages = TALK[:2]
    assert prompt(own, messages, tools) == theirs(own, messages, tools)


def test_tools_are_rendered_by_the_default_template_without_tool_use() -> None:
    own = named([{"name": "default", "template": QWEN}, {"name": "rag", "template": PLAIN}])
    assert prompt(own, TALK[:2], TOOLS) == theirs(own, TALK[:2], TOOLS)


def test_a_run_trains_conversations_with_and_without_tools(tmp_path: Path) -> None:
    own = named()
    plain = [TALK[1], TALK[-1]]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": TALK, "tools": TOOLS}) + "\n" + json.dumps({"messages": plain})
    )
    text = load(tmp_path / "a.jsonl", own)
    assert own.decode(theirs(own, TALK[:2], TOOLS)) in text
    assert own.decode(theirs(own, plain[:1], None)) in text


def test_only_a_template_for_tools(tmp_path: Path) -> None:
    own = named([{"name": "tool_use", "template": ONLY_CALLS}])
    assert prompt(own, TALK[:2], TOOLS) == theirs(own, TALK[:2], TOOLS)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK[1:2] + TALK[-1:]}))
    with pytest.raises(UserError, match="messages need a chat template, which the model lacks"):
        load(tmp_path / "a.jsonl", own)


def test_the_ends_of_both_templates_end_a_text() -> None:
    own = named()
    ends = [own.library.token_to_id(name) for name in ("</s>", "<|im_end|>")]
    assert stop_ids(own, DataConfig()) == tuple(ends)


def test_a_template_that_needs_tools_has_an_end() -> None:
    own = named(
        [NAMED[0], {"name": "tool_use", "template": "{% if not tools %}{{ raise_exception('no') }}{% endif %}" + QWEN}]
    )
    form = chat_format(own, DataConfig(), with_tools=True)
    assert form is not None
    assert form.end.stop_id == own.library.token_to_id("<|im_end|>")


def test_named_templates_are_saved(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, named())
    assert load_tokenizer(tmp_path).special.templates == {"default": PLAIN, "tool_use": QWEN}
