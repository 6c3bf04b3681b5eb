"""Records of conversations: every shape that data sets use becomes the same messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.data.chat.labels import RejectedAnswer
from jaxgpt.data.chat.records import ChatRecord, Pair, read_record
from jaxgpt.data.files.lenient_json import Twice
from jaxgpt.data.files.records import without_nulls
from jaxgpt.errors import UserError

Message = dict[str, Any]

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
TALK = [USER, ANSWER]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def call(arguments: Any, **others: Any) -> Message:
    return {**others, "type": "function", "function": {"name": "add", "arguments": arguments}}


CALLS = {"role": "assistant", "tool_calls": [call({"x": 1})]}

NOW = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}]}
SHAPES: dict[str, tuple[Any, list[Message]]] = {
    "OpenAI": ({"messages": TALK}, TALK),
    "OpenAI, beside another form": ({"messages": TALK, "prompt": "Hi", "completion": "x", "text": "x"}, TALK),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, TALK),
    "ShareGPT with a system message": (
        {
            "system": "Be brief.",
            "conversations": [{"from": "user", "value": "Hi"}, {"from": "model", "value": "Hello"}],
        },
        [SYSTEM, *TALK],
    ),
    "a system message is not added twice": ({"system": "Other", "messages": [SYSTEM, *TALK]}, [SYSTEM, *TALK]),
    "conversations with roles": ({"conversations": TALK}, TALK),
    "LMSYS": ({"conversation": TALK, "model": "m"}, TALK),
    "Alpaca": ({"instruction": "Hi", "input": "", "output": "Hello", "text": "all of it"}, TALK),
    "Alpaca with an input": (
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        [{"role": "user", "content": "Add.\n1, 2"}, {"role": "assistant", "content": "3"}],
    ),
    "Alpaca with a history": (
        {"instruction": "Hi", "output": "Hello", "history": [["a", "b"]], "system": "Be brief."},
        [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *TALK],
    ),
    "Dolly": ({"instruction": "Hi", "context": "", "response": "Hello", "category": "qa"}, TALK),
    "TRL": ({"prompt": [USER], "completion": [ANSWER]}, TALK),
    "TRL as JSON": ({"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])}, TALK),
    "TRL with a prompt as JSON": ({"prompt": json.dumps([USER]), "completion": [ANSWER]}, TALK),
    "a prompt as JSON and a text": ({"prompt": json.dumps([USER]), "completion": "Hello"}, TALK),
    "TRL with several turns": (
        {"prompt": [*TALK, USER], "completion": [ANSWER]},
        [USER, ANSWER | {"weight": 0}, USER, ANSWER],
    ),
    "prompt and completion with a history": (
        {"prompt": "Hi", "completion": "Hello", "history": [["a", "b"]]},
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *TALK],
    ),
    "a history after the system message of a prompt": (
        {"prompt": [SYSTEM, USER], "completion": [ANSWER], "history": [["a", "b"]]},
        [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *TALK],
    ),
    "a system message is not added before a history": (
        {"system": "Other", "prompt": [SYSTEM, USER], "completion": [ANSWER], "history": [["a", "b"]]},
        [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *TALK],
    ),
    "prompt and response with an empty context": ({"prompt": "Hi", "response": "Hello", "context": ""}, TALK),
    "a call without arguments": ({"messages": [USER, CALLS | {"tool_calls": [{"name": "now"}]}]}, [USER, NOW]),
    "prompt and response": ({"prompt": "Hi", "response": "Hello"}, TALK),
    "GSM8K": ({"question": "Hi", "answer": "Hello"}, TALK),
    "OpenOrca": ({"id": 1, "system_prompt": "Be brief.", "question": "Hi", "response": "Hello"}, [SYSTEM, *TALK]),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, "i"]}, ANSWER]},
        TALK,
    ),
    "a weight of 1": ({"messages": [USER, ANSWER | {"weight": 1}]}, TALK),
    "a weight of 0": ({"messages": [USER, ANSWER | {"weight": 0}]}, [USER, ANSWER | {"weight": 0}]),
    "train": ({"messages": [USER, ANSWER | {"train": False}]}, [USER, ANSWER | {"weight": 0}]),
    "loss": ({"messages": [USER, ANSWER | {"loss": False}]}, [USER, ANSWER | {"weight": 0}]),
    "a mask": ({"messages": [USER | {"loss_mask": 0}, ANSWER | {"loss_mask": 1}]}, TALK),
    "a mask of 0": ({"messages": [USER, ANSWER | {"loss_mask": 0}]}, [USER, ANSWER | {"weight": 0}]),
    "a loss of 0": ({"messages": [USER, ANSWER | {"loss": 0}]}, [USER, ANSWER | {"weight": 0}]),
    "a loss of 0 in a table of floats": ({"messages": [USER, ANSWER | {"loss": 0.0}]}, [USER, ANSWER | {"weight": 0}]),
    "an answer with a loss": ({"messages": [USER | {"loss": False}, ANSWER | {"loss": True}]}, TALK),
    "a measured loss": ({"messages": [USER, ANSWER | {"loss": 0.7}]}, TALK),
    "parts of an answer that is not a target": (
        {"messages": [USER, ANSWER | {"train": False, "train_detail": [{"begin_offset": 0, "end_offset": 2}]}]},
        [USER, ANSWER | {"weight": 0}],
    ),
    "no parts of an answer": ({"messages": [USER, ANSWER | {"train_detail": []}]}, TALK),
    "two equal marks": ({"messages": [USER, ANSWER | {"weight": 1, "train": True}]}, TALK),
    "two equal marks of 0": (
        {"messages": [USER, ANSWER | {"weight": 0, "train": False}]},
        [USER, ANSWER | {"weight": 0}],
    ),
    "names of two shapes": ({"messages": [USER | {"from": "human", "value": "Hi"}, ANSWER | {"value": "Hello"}]}, TALK),
    "a sender and a number": ({"messages": [USER | {"from": "Ann", "value": 0.5}, ANSWER]}, TALK),
    "an accepted answer": ({"messages": TALK, "label": True}, TALK),
    "an accepted answer in LLaMA-Factory": ({"messages": TALK, "kto_tag": True}, TALK),
    "the label of a class": ({"messages": TALK, "label": "greeting"}, TALK),
    "the label of a class, or of a rejected answer": ({"messages": TALK, "label": 0}, TALK),
    "the label of the class of a question": ({"question": "Hi", "answer": "Hello", "label": "greeting"}, TALK),
    "an accepted answer as a number": ({"question": "Hi", "answer": "Hello", "label": 1.0}, TALK),
    "an accepted answer as a text": ({"messages": TALK, "kto_tag": "True"}, TALK),
    "the label of a conversation": ({"messages": TALK, "label": False}, TALK),
    "a text in parts and its value": (
        {"messages": [USER, ANSWER | {"content": [{"type": "text", "text": "Hello"}], "value": "Hello\n"}]},
        TALK,
    ),
    "a developer from the system": (
        {"messages": [{"role": "developer", "from": "system", "content": "x"}, *TALK]},
        [{"role": "developer", "content": "x"}, *TALK],
    ),
    "an image that no message has": ({"messages": TALK, "image": "http://a/b.jpg"}, TALK),
    "a tag of HTML": (
        {"messages": [USER | {"content": "Close <video>"}, ANSWER], "images": [], "video": None},
        [USER | {"content": "Close <video>"}, ANSWER],
    ),
    "two unused system messages": (
        {"messages": [SYSTEM, *TALK], "system": "a", "system_prompt": "b"},
        [SYSTEM, *TALK],
    ),
    "a weight of a message that is never a target": ({"messages": [USER | {"weight": 0}, ANSWER]}, TALK),
    "roles of templates": (
        {"messages": [{"role": "developer", "content": "x"}, USER, ANSWER, {"role": "ipython", "content": "1"}]},
        [{"role": "developer", "content": "x"}, USER, ANSWER, {"role": "ipython", "content": "1"}],
    ),
    "roles with spaces": ({"messages": [USER | {"role": " Human"}, ANSWER | {"role": "assistant "}]}, TALK),
    "roles in other cases": (
        {"conversations": [{"from": "System", "value": "Be brief."}, {"from": "Human", "value": "Hi"}, ANSWER]},
        [SYSTEM, *TALK],
    ),
    "Cohere": ({"messages": [USER | {"role": "User"}, ANSWER | {"role": "Chatbot"}]}, TALK),
    "OpenAssistant": ({"messages": [USER | {"role": "prompter"}, ANSWER]}, TALK),
    "LangChain": ({"messages": [USER | {"role": "human"}, ANSWER | {"role": "ai"}]}, TALK),
    "ms-swift": (
        {
            "messages": [
                USER,
                {"role": "tool_call", "content": '{"name": "add", "arguments": {"x": 1}}'},
                {"role": "tool_response", "content": "2"},
                {"role": "tool_call", "content": '{"name": "add", "arguments": {"x": 1}}'},
                {"role": "tool_call", "content": '{"name": "now"}'},
                {"role": "tool_response", "content": "2"},
                ANSWER,
            ]
        },
        [
            *(USER, CALLS, {"role": "tool", "content": "2"}),
            {"role": "assistant", "tool_calls": [*CALLS["tool_calls"], *NOW["tool_calls"]]},
            *({"role": "tool", "content": "2"}, ANSWER),
        ],
    ),
    "capitals in calls": (
        {
            "messages": [
                USER,
                {"role": "Tool_Call", "content": '{"name": "add", "arguments": {"x": 1}}'},
                {"role": "FUNCTION_CALL", "content": '{"name": "now"}'},
                ANSWER,
            ]
        },
        [USER, {"role": "assistant", "tool_calls": [*CALLS["tool_calls"], *NOW["tool_calls"]]}, ANSWER],
    ),
    "fields of messages": (
        {"messages": [USER | {"name": "Ann", "weight": None}, ANSWER | {"audio": 1}]},
        [USER | {"name": "Ann"}, ANSWER | {"audio": 1}],
    ),
    "reasoning": (
        {"messages": [USER, ANSWER | {"thinking": "Hm."}, USER, ANSWER | {"reasoning_content": "Hm."}]},
        [USER, ANSWER | {"thinking": "Hm.", "reasoning_content": "Hm."}] * 2,
    ),
    "null fields": ({"messages": TALK, "conversations": None, "tools": None, "system": None}, TALK),
    "calls": ({"messages": [USER, CALLS]}, [USER, CALLS]),
    "calls with a null content": ({"messages": [USER, CALLS | {"content": None}]}, [USER, CALLS]),
    "calls with a content": ({"messages": [USER, CALLS | {"content": ""}]}, [USER, CALLS | {"content": ""}]),
    "arguments as JSON": (
        {"messages": [USER, CALLS | {"tool_calls": [call('{"x": 1}')]}]},
        [USER, CALLS | {"tool_calls": [call('{"x": 1}')]}],
    ),
    "calls as JSON": (
        {"messages": [USER, CALLS | {"tool_calls": json.dumps([call('{"x": 1}')])}]},
        [USER, CALLS | {"tool_calls": [call('{"x": 1}')]}],
    ),
    "bare calls": (
        {"messages": [USER, CALLS | {"tool_calls": [{"name": "add", "arguments": {"x": 1}}]}]},
        [USER, CALLS],
    ),
    "an id of a call": (
        {"messages": [USER, CALLS | {"tool_calls": [call("", id="a1")]}]},
        [USER, CALLS | {"tool_calls": [call({}, id="a1")]}],
    ),
    "OpenAI before tools": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"x": 1}'}},
            ]
        },
        [USER, CALLS | {"tool_calls": [call('{"x": 1}')]}],
    ),
    "LLaMA-Factory": (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "Hello"},
            ]
        },
        [USER, CALLS, {"role": "tool", "content": "2"}, ANSWER],
    ),
    "no calls": ({"messages": [USER, ANSWER | {"tool_calls": []}]}, TALK),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_become_messages(name: str) -> None:
    record, expected = SHAPES[name]
    before = json.dumps(record)
    chat = read_record(record)
    assert chat == ChatRecord(expected, may_be_rejected="label" in record and not record["label"])
    assert json.dumps(record) == before, "the record is not changed"


@pytest.mark.parametrize("name", SHAPES)
def test_messages_are_a_fixed_point(name: str) -> None:
    _, messages = SHAPES[name]
    assert read_record({"messages": messages}) == ChatRecord(messages)


def test_strings_are_a_pair() -> None:
    pair = read_record({"prompt": "Hi", "completion": "Hello", "id": 3})
    assert pair == Pair("Hi", "Hello")
    assert isinstance(pair, Pair)
    assert pair.chat == ChatRecord(TALK)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("tools", [TOOL], [TOOL]),
        ("tools", json.dumps([TOOL]), [TOOL]),
        ("tools", [], None),
        ("tools", "[]", None),
        ("tools", "", None),
        ("functions", [TOOL["function"]], [TOOL]),
        ("functions", [TOOL], [TOOL]),
    ],
)
@pytest.mark.parametrize("shape", [{"messages": TALK}, {"prompt": "Hi", "completion": "Hello"}])
def test_tools(field: str, value: Any, expected: Any, shape: dict[str, Any]) -> None:
    chat = read_record({**shape, field: value})
    if isinstance(chat, Pair):
        chat = chat.chat
    assert chat == ChatRecord(TALK, expected)


@pytest.mark.parametrize("described", [TOOL, TOOL["function"]])
@pytest.mark.parametrize("function", [TOOL, TOOL["function"]])
def test_equal_tools_and_functions_are_the_same_tools(described: Any, function: Any) -> None:
    record = {"messages": TALK, "tools": [described], "functions": [function]}
    assert read_record(record) == ChatRecord(TALK, [described])


def test_functions_next_to_an_empty_list_of_tools_are_the_tools() -> None:
    record = {"messages": TALK, "tools": "[]", "functions": [TOOL["function"]]}
    assert read_record(record) == ChatRecord(TALK, [TOOL])


ERRORS: dict[str, tuple[Any, str]] = {
    "different tools and functions": (
        {"messages": TALK, "tools": [TOOL], "functions": [{"name": "subtract"}]},
        "the fields 'tools' and 'functions' describe different functions: remove one",
    ),
    "a mask of tokens": (
        {"messages": [USER, ANSWER | {"loss_mask": [0, 1]}]},
        "message 2 has the loss_mask .0, 1.: use 1, or 0 for no loss on this message",
    ),
    "a list": ([1], "a conversation must be an object, not .1.: write"),
    "documents": ({"text": "a", "id": 1}, "no known shape: the fields are .'text', 'id'.; use one of \"messages\""),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"a preference pair \(chosen, rejected\) is no"),
    "two shapes": (
        {"conversations": TALK, "question": "a", "answer": "b"},
        "an ambiguous shape: .*'question', 'answer'",
    ),
    "two answers": ({"question": "a", "answer": "b", "response": "c"}, "an ambiguous shape: "),
    "a context": ({"question": "a", "answer": "b", "context": "c"}, "'context' has no defined place in 'question'"),
    "a context of a prompt": (
        {"prompt": "a", "response": "b", "context": "c"},
        "'context' has no defined place in 'prompt'",
    ),
    "an instruction": (
        {"instruction": "c", "question": "a", "answer": "b"},
        "'instruction' has no defined place in 'question'",
    ),
    "an answer that is a number": (
        {"instruction": "a", "output": 4},
        "the field 'output' must be a text or a list of messages, not 4",
    ),
    "choices of an instruction with an input": (
        {"instruction": "a", "input": "i", "output": "b", "choices": ["c"]},
        "'choices' has no defined place in 'instruction'",
    ),
    "no calls as JSON": (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": "[]"}]},
        "message 2 has no content",
    ),
    "choices": ({"question": "a", "answer": "b", "choices": ["c"]}, "'choices' has no defined place"),
    "no messages": ({"messages": []}, r"messages must be a list such as \[.*\]: \[\]"),
    "a message": ({"messages": ["Hi"]}, "message 1 must be an object with role and content, not 'Hi'"),
    "no role": ({"messages": [{"content": "Hi"}]}, "message 1 has no role"),
    "no content": ({"messages": [USER, {"role": "assistant", "content": None}]}, "message 2 has no content"),
    "a number": ({"messages": [USER | {"content": 1}]}, "message 1 has a content that is neither .*: 1"),
    "an image": (
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]},
        "message 1 has a part of the type 'image_url': only text is supported",
    ),
    "an image of LLaVA": (
        {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat?"}, ANSWER]},
        "message 1 has <image>, the placeholder of the image of the record: only text is supported",
    ),
    "videos of ms-swift": (
        {"messages": [SYSTEM, USER | {"content": "<video>What?"}, ANSWER], "videos": ["a.mp4"]},
        "message 2 has <video>, the placeholder of the video of the record",
    ),
    "an image of a prompt": (
        {"prompt": "<image>What?", "completion": "A cat", "images": [{"bytes": "x"}]},
        "message 1 has <image>, the placeholder of the image of the record",
    ),
    "a part": ({"messages": [USER | {"content": [1]}]}, "message 1 has a part that is not a text: 1"),
    "contradicting marks": (
        {"messages": [USER, ANSWER | {"weight": 1, "train": False}]},
        "message 2 has the weight 1 and the train False, which contradict each other: remove one",
    ),
    "contradicting marks, the other way round": (
        {"messages": [USER, ANSWER | {"weight": 0, "train": True}]},
        "message 2 has the weight 0 and the train True, which contradict",
    ),
    "contradicting marks of two programs": (
        {"messages": [USER, ANSWER | {"weight": 1, "loss": False}]},
        "message 2 has the weight 1 and the loss False, which contradict",
    ),
    "parts of an answer": (
        {"messages": [USER, ANSWER | {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}]},
        "message 2 has 'train_detail', which selects parts of an answer as targets: only complete answers can be selected",
    ),
    "a wrong mark, and a correct one": (
        {"messages": [USER, ANSWER | {"weight": 1, "train": "no"}]},
        "message 2 has the train 'no': use 1, or 0",
    ),
    "contradicting roles": (
        {"messages": [USER, {"role": "user", "from": "gpt", "content": "Hello"}]},
        "message 2 has the role 'user', but is from 'gpt': remove one",
    ),
    "contradicting contents": (
        {"messages": [USER, ANSWER | {"value": "Bye"}]},
        "message 2 has both content and value, which differ: remove one",
    ),
    "two system messages": (
        {"system": "a", "system_prompt": "b", "messages": TALK},
        "the fields 'system' and 'system_prompt' differ: remove one",
    ),
    "a rejected answer": (
        {"prompt": "Hi", "completion": "Go away", "label": False},
        "the label False marks a rejected answer, as in preference data: remove the record",
    ),
    "a rejected answer in LLaMA-Factory": (
        {"messages": TALK, "kto_tag": False},
        "the kto_tag False marks a rejected answer, as in preference data",
    ),
    "a label that is given twice": (
        {"prompt": "Hi", "completion": "Go away", "label": Twice()},
        "the label is given twice: remove one",
    ),
    "a kto_tag that is given twice": ({"messages": TALK, "kto_tag": Twice()}, "the kto_tag is given twice: remove one"),
    "a kto_tag that is neither true nor false": (
        {"messages": TALK, "kto_tag": "bad"},
        r"the kto_tag must be true \(an accepted answer\) or false \(a rejected one\), not 'bad'",
    ),
    "a weight": ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "message 2 has the weight 0.5: use 1, or 0"),
    "tools": ({"messages": TALK, "tools": "add"}, "the field 'tools' is a string, but not valid JSON"),
    "tools as strings": ({"messages": TALK, "tools": ["add"]}, "the field 'tools' must be a list of objects"),
    "a call": ({"messages": [USER, CALLS | {"tool_calls": [{}]}]}, "message 2 has a call without the name"),
    "arguments": ({"messages": [USER, CALLS | {"tool_calls": [call("[1]")]}]}, "arguments that are not an object"),
    "broken arguments": (
        {"messages": [USER, CALLS | {"tool_calls": [call("{")]}]},
        "arguments of a call of message 2 is",
    ),
    "arguments with a different name": (
        {"messages": [USER, CALLS | {"tool_calls": [{"name": "add", "parameters": {"x": 1}}]}]},
        "message 2 has a call with 'parameters' instead of 'arguments': rename",
    ),
    "arguments with a different name in ShareGPT": (
        {"conversations": [USER, {"from": "function_call", "value": '{"name": "add", "args": {"x": 1}}'}]},
        "message 2 has a call with 'args' instead of 'arguments': rename",
    ),
    "null arguments": (
        {
            "messages": [
                USER,
                CALLS | {"tool_calls": [call(None) | {"function": {"name": "add", "arguments": None, "input": "1"}}]},
            ]
        },
        "message 2 has a call with 'input' instead of 'arguments': rename",
    ),
    "arguments with a key twice, as JSON": (
        {"messages": [USER, CALLS | {"tool_calls": [call('{"x": [{"y": 1, "y": 2}]}')]}]},
        "message 2 has a call with a key that is given twice: .*; remove one",
    ),
    "arguments with a key twice": (
        {"messages": [USER, CALLS | {"tool_calls": [call({"x": Twice()})]}]},
        "message 2 has a call with a key that is given twice: .*; remove one",
    ),
    "tools with a key twice": (
        {"messages": TALK, "tools": '[{"name": "add", "name": "sub"}]'},
        "the field 'tools' has a key that is given twice: remove one",
    ),
    "history": ({"instruction": "a", "output": "b", "history": ["c"]}, "'history' must have pairs"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_other_records_are_one_line(name: str) -> None:
    record, expected = ERRORS[name]
    with pytest.raises(UserError, match=expected) as caught:
        read_record(record)
    assert "\n" not in str(caught.value)


texts = st.text(max_size=8)
arguments = st.dictionaries(texts, st.one_of(st.integers(), texts, st.lists(texts, max_size=2)), max_size=2)
calls = st.lists(arguments.map(call), min_size=1, max_size=2)
turns = st.one_of(
    texts.map(lambda text: {"role": "user", "content": text}),
    texts.map(lambda text: {"role": "assistant", "content": text}),
    texts.map(lambda text: {"role": "assistant", "content": text, "weight": 0}),
    texts.map(lambda text: {"role": "tool", "content": text}),
    calls.map(lambda calls: {"role": "assistant", "tool_calls": calls}),
)
talks = st.lists(turns, min_size=1, max_size=5)


def as_share_gpt(message: Message) -> Message:
    """Return a message with the names of ShareGPT."""
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    return {"from": names[message["role"]], "value": message.get("content"), **others}


def as_parts(message: Message) -> Message:
    """Return a message with one text part per character."""
    if "content" not in message:
        return message
    return message | {"content": [{"type": "text", "text": character} for character in message["content"]]}


def as_struct(message: Message) -> Message:
    """Return a message as a row of a Parquet column, with all fields of all rows."""
    return dict.fromkeys(("name", "weight", "tool_calls")) | message


@given(talks)
def test_converted_shapes_are_equal(talk: list[Message]) -> None:
    expected = read_record({"messages": talk})
    assert expected == ChatRecord(talk)
    assert read_record({"conversations": [as_share_gpt(message) for message in talk]}) == expected
    assert read_record({"messages": [as_parts(message) for message in talk]}) == expected
    assert read_record(without_nulls({"messages": [as_struct(message) for message in talk]})) == expected
    assert read_record({"messages": json.dumps(talk)}) == expected


@pytest.mark.parametrize("false", [False, 0, 0.0, "false", "False", "0"])
@pytest.mark.parametrize(
    "record",
    [
        {"messages": TALK, "kto_tag": None},
        {"prompt": "Hi", "completion": "Go away", "kto_tag": None},
        {"prompt": "Hi", "completion": "Go away", "label": None},
    ],
    ids=json.dumps,
)
def test_rejected_answers_are_rejected_in_every_form_of_false(record: dict[str, Any], false: Any) -> None:
    """Tables store truth values also as numbers and texts."""
    read_record(record)
    *_, field = record
    with pytest.raises(RejectedAnswer, match=f"the {field} .* marks a rejected answer"):
        read_record(record | {field: false})
