"""Prompts of rollouts: shapes of records, ids, and records that cannot be used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_chat import talker

from jaxgpt.config import Config, DataConfig, ModelConfig, PostConfig
from jaxgpt.data import PromptSplit, open_data
from jaxgpt.data.chat.encoding import chat_format
from jaxgpt.data.chat.formats import DATE
from jaxgpt.data.prompt_records import read_prompt
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.errors import UserError

CONFIG = Config(
    data=DataConfig(path="prompts.jsonl", dataset="none", train_fraction=1.0),
    model=ModelConfig(block_size=64),
    post=PostConfig(objective="grpo", reward=("json",), max_new_tokens=8),
)
TOKENIZER = talker(8, end=False).tokenizer
USER = {"role": "user", "content": "2 + 2?"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*records: Any) -> None:
    Path("prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def read(*records: Any, tokenizer: Any = TOKENIZER) -> PromptSplit:
    write(*records)
    data = open_data(CONFIG, tokenizer)
    assert isinstance(data.train, PromptSplit)
    return data.train


def test_prompts_are_what_chat_sends() -> None:
    form = chat_format(TOKENIZER, CONFIG.data, date=DATE)
    assert form is not None
    shapes: list[Any] = [
        {"prompt": "2 + 2?", "answer": "4"},
        {"prompt": [USER]},
        {"messages": [USER]},
        {"messages": json.dumps([USER])},
        {"question": "2 + 2?"},
    ]
    split = read(*shapes)
    assert all(prompt.ids == form.prompt_ids([USER]) for prompt in split.prompts)
    assert split.prompts[0].record == shapes[0]
    assert split.prompts[1].prompt == [USER]


def test_messages_as_json_are_messages() -> None:
    """Tables store lists of messages as texts."""
    messages = [{"role": "user", "content": "Hi"}]
    assert read_prompt({"prompt": json.dumps(messages)})[:2] == read_prompt({"prompt": messages})[:2]


def test_a_prompt_with_other_json_is_a_text() -> None:
    for text in ("[1, 2]", '[{"a": 1}]', "[]", "[", '{"role": "user"}'):
        assert read_prompt({"prompt": text}).prompt == text


def test_fields_of_a_request_belong_to_its_prompt_as_in_conversations() -> None:
    form = chat_format(TOKENIZER, CONFIG.data, date=DATE)
    assert form is not None
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    split = read(
        {"instruction": "Translate.", "input": "Hallo", "output": "Hello"},
        {"query": "2 + 2?", "history": [["Hi", "Hello"]]},
    )
    instruction, query = split.prompts
    assert instruction.ids == form.prompt_ids([{"role": "user", "content": "Translate.\nHallo"}])
    assert instruction.prompt == "Translate."
    assert query.ids == form.prompt_ids([*earlier, USER])


@pytest.mark.parametrize("name", ["prompt", "question"])
def test_a_history_belongs_to_a_prompt_that_is_a_list_of_messages(name: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chat = read_prompt({name: [system, USER], "history": [["Hi", "Hello"]], "system": "Other"}).chat
    assert not isinstance(chat, str)
    assert chat.messages == [system, *earlier, USER]


def test_input_of_an_instruction_without_a_template() -> None:
    split = read({"instruction": "ab", "input": "c"}, tokenizer=CharTokenizer([*"abc\n"]))
    assert split.prompts[0].ids == [1, 2, 0, 3]


def test_fields_that_only_the_reward_sees_are_named() -> None:
    write(
        {"question": "Who?", "context": "Ann", "answer": "Ann"},
        {"question": "Who?", "instruction": "Say it."},
        {"instruction": "Say", "input": "it"},
    )
    source = open_data(CONFIG, TOKENIZER).source
    assert "only the reward sees context, instruction: write them into the prompt if the model needs them" in source


def test_texts_without_a_template() -> None:
    split = read({"prompt": "abc"}, tokenizer=CharTokenizer([*"abc"]))
    assert split.prompts[0].ids == [0, 1, 2]


BAD = {
    "none": ({"text": "a"}, "no prompt: the fields are ['text']; write {"),
    "empty": ({"prompt": ""}, "the prompt is empty: write {"),
    "answered": (
        {"prompt": [USER, {"role": "assistant", "content": "4"}]},
        "the prompt ends with a message of the assistant",
    ),
    "media": ({"prompt": "<image> 2?", "images": ["a.png"]}, "message 1 has <image>, the placeholder of the image"),
    "media in messages": (
        {"prompt": [{"role": "user", "content": "<audio>"}], "audio": "a.wav"},
        "message 1 has <audio>, the placeholder of the audio",
    ),
    "long": (
        {"prompt": "a" * 50},
        "new tokens exceed model.block_size 64: lower --post.max-new-tokens, or shorten the prompt",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_records_that_cannot_be_used(name: str) -> None:
    record, said = BAD[name]
    write({"prompt": "a"}, record)
    with pytest.raises(UserError) as error:
        open_data(CONFIG, TOKENIZER)
    assert str(error.value).startswith("prompts.jsonl, line 2: ")
    assert said in str(error.value)
    skipping = replace(CONFIG, data=replace(CONFIG.data, on_error="skip"))
    assert open_data(skipping, TOKENIZER).train.window_count(64) == 1


def test_text_is_rejected() -> None:
    Path("text.txt").write_text("abc" * 99)
    with pytest.raises(
        UserError, match=r"post.objective grpo needs prompts \(.jsonl, .json or .parquet\), but text.txt holds text"
    ):
        open_data(replace(CONFIG, data=replace(CONFIG.data, path="text.txt")), TOKENIZER)


def test_messages_that_the_template_omits_are_reported() -> None:
    """Conversations have the same warning: otherwise, a model may learn without the text of its system messages."""
    own = talker(8, end=False).tokenizer
    begin = "{% for m in messages %}{% if m.role != 'system' %}"
    turn = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    start = "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    own.special = SpecialTokens({}, {"chat_template": begin + turn + start})
    write({"prompt": "2?"}, {"prompt": "3?", "system": "Be brief."})
    source = open_data(CONFIG, own).source
    assert "; warning: the chat template omits 1 message of the role system (first: prompts.jsonl, line 2)" in source


@pytest.mark.parametrize("reward", ["exact", "number"])
@pytest.mark.parametrize("answer", [None, float("nan"), True, ["4"]])
def test_records_without_a_usable_expected_answer(reward: str, answer: Any) -> None:
    rewarded = replace(CONFIG, post=replace(CONFIG.post, reward=(reward,)))
    write({"prompt": "a", "answer": "4"}, {"prompt": "b", "answer": answer})
    with pytest.raises(UserError, match=r"prompts\.jsonl, line 2: .*field 'answer' with the expected answer"):
        open_data(rewarded, TOKENIZER)
    data = open_data(replace(rewarded, data=replace(CONFIG.data, on_error="skip")), TOKENIZER)
    assert data.train.window_count(64) == 1
    assert "skipped 1 record: 1 without the expected answer (first: prompts.jsonl, line 2: " in data.source
