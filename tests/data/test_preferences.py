"""Preference pairs: shapes of records, ids and targets, windows, and records that cannot be used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import talker

from jaxgpt.config import Config, DataConfig, ModelConfig, PostConfig
from jaxgpt.data import Preferences, open_data
from jaxgpt.data.chat.encoding import ChatFormat, chat_format
from jaxgpt.data.chat.formats import DATE, formats_of
from jaxgpt.data.conversations import encode_conversation
from jaxgpt.data.preference_records import read_preference
from jaxgpt.data.preferences import Preference, encode_preference, prompt_ids
from jaxgpt.data.source_kinds import check_sources
from jaxgpt.data.tokenizers.base import CharTokenizer, Tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.errors import UserError
from jaxgpt.report.preferences import describe_preferences

CONFIG = Config(
    data=DataConfig(path="pairs.jsonl", dataset="none"),
    model=ModelConfig(block_size=64),
    post=PostConfig(objective="dpo"),
)
TOKENIZER = talker(8, end=False).tokenizer
GOOD = {"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def encoded(record: Any, tokenizer: Tokenizer = TOKENIZER) -> Preference:
    return encode_preference(read_preference(record), tokenizer, formats_of(tokenizer, CONFIG.data))


def same(a: Preference, b: Preference) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x.ids.tolist() == y.ids.tolist() and x.is_target.tolist() == y.is_target.tolist() for x, y in pairs)


def write(*records: Any) -> None:
    Path("pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def form_of(tokenizer: Tokenizer) -> ChatFormat:
    form = chat_format(tokenizer, CONFIG.data, date=DATE)
    assert form is not None
    return form


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=12).map(lambda t: f"x{t}x")


@settings(max_examples=25)
@given(st.lists(texts, min_size=1, max_size=4), texts, texts)
def test_a_text_is_what_chat_sends_then_the_answer_and_its_end(turns: list[str], chosen: str, rejected: str) -> None:
    """The targets are the answer and the end of the turn."""
    turns = turns if len(turns) % 2 else turns[:-1]
    prompt = [user(text) if n % 2 == 0 else assistant(text) for n, text in enumerate(turns)]
    if chosen == rejected:
        return
    pair = encoded({"prompt": prompt, "chosen": [assistant(chosen)], "rejected": [assistant(rejected)]})
    form = form_of(TOKENIZER)
    sent = form.prompt_ids(prompt)
    for text, answer in zip(pair, (chosen, rejected), strict=True):
        assert text.ids[: len(sent)].tolist() == sent
        assert TOKENIZER.decode(text.ids[len(sent) :]) == answer + "<|im_end|>"
        assert text.is_target.tolist() == [False] * len(sent) + [True] * (len(text.ids) - len(sent))


def test_a_text_is_the_conversation_of_fine_tuning() -> None:
    prompt = [user("Hi"), assistant("Hello"), user("Bye")]
    pair = encoded({"prompt": prompt, "chosen": [assistant("Bye!")], "rejected": [assistant("No")]})
    talk = read_preference({"prompt": prompt, "chosen": [assistant("Bye!")], "rejected": [assistant("No")]}).chosen
    [conversation] = encode_conversation(talk, TOKENIZER, form_of(TOKENIZER))
    assert pair.chosen.ids.tolist() == conversation.ids.tolist()
    assert TOKENIZER.decode(pair.chosen.ids[pair.chosen.is_target]) == "Bye!<|im_end|>"


EXPLICIT = {
    "prompt": [user("Hi"), assistant("Hello"), user("Who?")],
    "chosen": [assistant("Me")],
    "rejected": [assistant("No")],
}
SHAPES = {
    "complete conversations": {
        "chosen": [*EXPLICIT["prompt"], assistant("Me")],
        "rejected": [*EXPLICIT["prompt"], assistant("No")],
    },
    "a prompt that the conversations repeat": {
        "prompt": "Who?",
        "chosen": [*EXPLICIT["prompt"], assistant("Me")],
        "rejected": [*EXPLICIT["prompt"], assistant("No")],
    },
    "messages that the conversations repeat": EXPLICIT
    | {
        "chosen": [*EXPLICIT["prompt"], assistant("Me")],
        "rejected": [*EXPLICIT["prompt"], assistant("No")],
    },
    "a request that the answers repeat": EXPLICIT
    | {"chosen": [user("Who?"), assistant("Me")], "rejected": [user("Who?"), assistant("No")]},
    "a request before equal messages": {
        "prompt": "Hi",
        "chosen": [assistant("Hello"), user("Who?"), assistant("Me")],
        "rejected": [assistant("Hello"), user("Who?"), assistant("No")],
    },
    "conversations as JSON": {
        "chosen": json.dumps([*EXPLICIT["prompt"], assistant("Me")]),
        "rejected": json.dumps([*EXPLICIT["prompt"], assistant("No")]),
    },
    "a prompt and conversations as JSON": {
        "prompt": json.dumps(EXPLICIT["prompt"]),
        "chosen": json.dumps([*EXPLICIT["prompt"], assistant("Me")]),
        "rejected": json.dumps([*EXPLICIT["prompt"], assistant("No")]),
    },
    "earlier pairs": {"history": [["Hi", "Hello"]], "prompt": "Who?", "chosen": "Me", "rejected": "No"},
    "earlier pairs of an instruction": {
        "history": [["Hi", "Hello"]],
        "instruction": "Who?",
        "chosen": [assistant("Me")],
        "rejected": [assistant("No")],
    },
    "a text prompt as JSON": {"prompt": json.dumps(EXPLICIT["prompt"]), "chosen": "Me", "rejected": "No"},
    "a prompt as JSON": {"messages": json.dumps(EXPLICIT["prompt"]), "chosen": "Me", "rejected": "No"},
    "texts as answers": EXPLICIT | {"chosen": "Me", "rejected": "No"},
    "single messages as answers": EXPLICIT | {"chosen": assistant("Me"), "rejected": assistant("No")},
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
            {"from": "human", "value": "Who?"},
        ],
        "chosen": {"from": "gpt", "value": "Me"},
        "rejected": {"from": "gpt", "value": "No"},
    },
    "other names than in the prompt": EXPLICIT
    | {
        "chosen": [{"from": "human", "value": "Who?"}, assistant("Me")],
        "rejected": [{"from": "human", "value": "Who?"}, assistant("No")],
    },
    "null fields in the prompt": EXPLICIT
    | {
        "prompt": [message | {"name": None} for message in EXPLICIT["prompt"]],
        "chosen": [user("Who?"), assistant("Me")],
        "rejected": [user("Who?"), assistant("No")],
    },
    "other fields": EXPLICIT | {"score_chosen": 5, "source": "x", "system": None},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_equal_pairs_have_equal_ids(name: str) -> None:
    assert same(encoded(SHAPES[name]), encoded(EXPLICIT))


def test_questions_with_a_system_message() -> None:
    record = {"system": "Be brief.", "question": "Who?", "chosen": "Me", "rejected": "No"}
    explicit = {"prompt": [{"role": "system", "content": "Be brief."}, user("Who?")], "chosen": "Me", "rejected": "No"}
    assert same(encoded(record), encoded(explicit))


def test_the_prompt_of_texts_is_their_common_beginning() -> None:
    """As in TRL, a space before the first difference belongs to the answers."""
    tokenizer = CharTokenizer([*"abcdefgh ?"])
    found = encoded({"chosen": "a bad cafe? face", "rejected": "a bad cafe? bag"}, tokenizer)
    assert same(found, encoded({"prompt": "a bad cafe?", "chosen": " face", "rejected": " bag"}, tokenizer))
    assert tokenizer.decode(prompt_ids(found.chosen)) == "a bad cafe?"


def test_texts_that_continue_each_other_are_compared_from_the_last_character_of_the_shorter_one() -> None:
    """As in TRL, a space before this character belongs to the prompt."""
    tokenizer = CharTokenizer([*"abcdefgh ?"])
    for short, long, prompt, chosen, rejected in (
        ("cab? ace", "cab? aced", "cab? ac", "e", "ed"),
        ("cab? a", "cab? ace", "cab? ", "a", "ace"),
    ):
        found = encoded({"chosen": short, "rejected": long}, tokenizer)
        assert same(found, encoded({"prompt": prompt, "chosen": chosen, "rejected": rejected}, tokenizer))


@pytest.mark.parametrize("prompt", ["List.", [user("List.")]])
def test_an_answer_that_is_json_remains_a_text(prompt: Any) -> None:
    for chosen, rejected in (('["a"]', '["b"]'), ('[{"role": "user"}]', "no"), ("[]", "[1]")):
        pair = encoded({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        assert TOKENIZER.decode(pair.chosen.ids[pair.chosen.is_target]) == f"{chosen}<|im_end|>"


def test_white_space_is_an_answer() -> None:
    pair = encoded(GOOD | {"chosen": " "})
    assert TOKENIZER.decode(pair.chosen.ids[pair.chosen.is_target]) == " <|im_end|>"


BAD = {
    "equal": (GOOD | {"rejected": "4"}, "the chosen and the rejected answer are equal"),
    "equal texts without a prompt": (
        {"chosen": "It is 4", "rejected": "It is 4"},
        "the chosen and the rejected answer are equal",
    ),
    "equal conversations": (
        {"chosen": [user("Who?"), assistant("Me")], "rejected": [user("Who?"), assistant("Me")]},
        "the chosen and the rejected answer are equal",
    ),
    "equal messages after a text": (
        {"prompt": "Who?", "chosen": [assistant("Me")], "rejected": [{"from": "gpt", "value": "Me"}]},
        "the chosen and the rejected answer are equal",
    ),
    "empty": (GOOD | {"chosen": ""}, "the chosen answer is empty: write an answer, or remove the record"),
    "empty texts without a prompt": ({"chosen": "", "rejected": ""}, "the chosen answer is empty"),
    "one text without a prompt and an empty one": ({"chosen": "It is 4", "rejected": ""}, "the rejected answer is empty"),
    "a conversation without an answer": (
        {"chosen": [user("Who?"), assistant("Me")], "rejected": [user("Who?")]},
        "the rejected answer is empty",
    ),
    "empty part of a text": (
        EXPLICIT | {"rejected": [assistant("") | {"content": [{"type": "text", "text": ""}]}]},
        "the rejected answer is empty",
    ),
    "empty messages": (EXPLICIT | {"rejected": [assistant(""), assistant("")]}, "the rejected answer is empty"),
    "empty message": (EXPLICIT | {"rejected": [assistant("")]}, "the rejected answer is empty"),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "no rejected answer: the fields are ['prompt', 'chosen']; write {"),
    "conversation": ({"messages": [user("a"), assistant("b")]}, "no chosen and no rejected answer"),
    "forms": (GOOD | {"chosen": [assistant("4")]}, "one answer is a text, and the other a list of messages"),
    "nothing shared": ({"chosen": "b", "rejected": "c"}, "the answers have no common beginning, and the record has no prompt"),
    "input without a prompt": (
        {"system": "S", "input": "2 + 2?", "chosen": "It is 4", "rejected": "It is 5"},
        "the record has no prompt, so the field 'input' has no defined place: rename the field with the request to 'prompt'",
    ),
    "history without a prompt": (
        {"history": [["a", "b"]], "chosen": "It is 4", "rejected": "It is 5"},
        "the record has no prompt, so the field 'history' has no defined place",
    ),
    "one system message": (
        {
            "prompt": "Who?",
            "chosen": [{"role": "system", "content": "S"}, user("Who?"), assistant("Me")],
            "rejected": [user("Who?"), assistant("No")],
        },
        "the chosen answer begins with a message that the assistant did not write: {'content': 'S', 'role': 'system'}; move it",
    ),
    "other requests": (
        {"chosen": [user("Hi"), user("Who?"), assistant("Me")], "rejected": [user("Hi"), user("What?"), assistant("No")]},
        "the chosen answer begins with a message that the assistant did not write",
    ),
    "no target": (
        EXPLICIT | {"chosen": [assistant("Me") | {"weight": 0}]},
        "all messages of an answer have the weight 0, so nothing is compared: set a weight to 1",
    ),
    "an answer of an unknown role": (
        EXPLICIT | {"rejected": [{"role": "gpt4", "content": "No"}]},
        "the rejected answer has no message of the assistant: the roles are ['gpt4']; rename the role to assistant",
    ),
    "answered prompt": (
        EXPLICIT | {"prompt": [user("Hi"), assistant("Me")]},
        "the prompt ends with a message of the assistant: end it with a message to answer",
    ),
    "media": (GOOD | {"prompt": "<image>?", "image": "a.png"}, "has <image>, the placeholder of the image of the record"),
    "type of the prompt": (GOOD | {"prompt": 4}, "the prompt must be a text or a list of messages, not 4: write {"),
    "type": (GOOD | {"chosen": 4}, "the chosen answer must be a text or a list of messages, not 4"),
    "long prompt": (
        GOOD | {"prompt": "a" * 99},
        "the prompt of 118 tokens leaves no room for an answer in model.block_size 64: shorten the texts",
    ),
    "equal in the window": (
        GOOD | {"chosen": "b" * 99 + "c", "rejected": "b" * 99 + "d"},
        "the answers are equal within the first 65 tokens (model.block_size 64): shorten the texts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_records_that_cannot_be_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one line with the place; with data.on_error skip, such records are counted."""
    monkeypatch.chdir(tmp_path)
    record, said = BAD[name]
    write(GOOD, record, GOOD | {"prompt": "3 + 3?"})
    with pytest.raises(UserError) as error:
        open_data(CONFIG, TOKENIZER)
    message = str(error.value)
    assert message.startswith("pairs.jsonl, line 2: ")
    assert said in message
    assert message.endswith("; to skip such records, use --data.on-error skip")

    data = open_data(replace(CONFIG, data=replace(CONFIG.data, on_error="skip", train_fraction=1.0)), TOKENIZER)
    assert data.train.window_count(64) == 2
    assert "skipped 1 record: 1 " in data.source
    assert "(first: pairs.jsonl, line 2: " in data.source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_records_are_checked_without_a_tokenizer(folder: Path) -> None:
    write(GOOD, GOOD | {"rejected": "4"})
    with pytest.raises(UserError, match=r"pairs.jsonl, line 2: the chosen and the rejected answer are equal"):
        check_sources(CONFIG)
    Path("pairs.jsonl").write_text("")
    with pytest.raises(UserError, match=r"pairs.jsonl has no preference pairs; write one per line, as"):
        check_sources(CONFIG)


def test_other_data_are_rejected(folder: Path) -> None:
    Path("text.txt").write_text("abc" * 99)
    text = replace(CONFIG, data=replace(CONFIG.data, path="text.txt"))
    with pytest.raises(UserError, match=r"post.objective dpo needs preference pairs .* but text.txt holds text"):
        open_data(text, TOKENIZER)
    with pytest.raises(UserError, match=r"post.objective dpo needs preference pairs: add --data.path pairs.jsonl"):
        open_data(replace(CONFIG, data=DataConfig(dataset="none")), TOKENIZER)
    write(GOOD)
    with pytest.raises(
        UserError, match=r"a preference pair \(chosen, rejected\) is not a conversation: train on pairs with"
    ):
        open_data(replace(CONFIG, post=PostConfig()), TOKENIZER)


def test_windows_hold_both_texts() -> None:
    pair = encoded(GOOD)
    longer = max(len(text.ids) for text in pair)
    for T in (longer - 1, longer + 5, longer - 4):
        [rows_2T3] = Preferences([pair]).windows(np.array([0]), T)
        for row_T3, text in zip(rows_2T3, pair, strict=True):
            n = min(len(text.ids) - 1, T)
            assert row_T3[:n, 0].tolist() == text.ids[:n].tolist()
            expected = np.where(text.is_target, text.ids, -1)[1 : n + 1]
            assert row_T3[:n, 1].tolist() == expected.tolist()
            assert row_T3[:, 2].tolist() == [0] * n + [-1] * (T - n)
            assert (row_T3[n:, 1] == -1).all()


def test_the_last_pairs_are_held_out_without_copies(folder: Path) -> None:
    write(*(GOOD | {"prompt": str(i % 18)} for i in range(20)))
    data = open_data(CONFIG, TOKENIZER)
    assert (data.train.window_count(64), data.held_out) == (18, False)
    assert "2 not held out, because they are also among the training pairs" in data.source
    write(*(GOOD | {"prompt": str(i)} for i in range(20)))
    data = open_data(CONFIG, TOKENIZER)
    assert (data.train.window_count(64), data.val.window_count(64), data.held_out) == (18, 2, True)
    assert "2 held out, fewer than 20" in data.source


def test_a_mixture_of_pairs(folder: Path) -> None:
    """Each source keeps its share of the rows, which have the shape of pairs."""
    for name in "ab":
        lines = [json.dumps(GOOD | {"prompt": f"{name}{i}"}) for i in range(10)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    mixed = replace(CONFIG, data=DataConfig(dataset="none", mix=("a.jsonl=0.5", "b.jsonl=0.5"), train_fraction=1.0))
    data = open_data(mixed, TOKENIZER)
    rows = data.train.windows(np.asarray(data.train.eval_starts(64, 64)), 64)
    assert rows.shape == (20, 2, 64, 3)


def test_parquet(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [EXPLICIT, EXPLICIT | {"prompt": [user("What?")]}]
    parquet.write_table(pa.Table.from_pylist(records), "pairs.parquet")
    data = open_data(replace(CONFIG, data=replace(CONFIG.data, path="pairs.parquet", train_fraction=1.0)), TOKENIZER)
    assert isinstance(data.train, Preferences)
    assert same(data.train.pairs[0], encoded(EXPLICIT))


def test_the_report_counts(folder: Path) -> None:
    """The pairs include one duplicate, two pairs that contradict each other, and one held-out pair with a training prompt."""
    swapped = {"prompt": "2 + 2?", "chosen": "five", "rejected": "4"}
    held_out = {"prompt": "2 + 2?", "chosen": "4!", "rejected": "5"}
    write(GOOD, GOOD, swapped, GOOD | {"prompt": "3?"}, held_out)
    data = open_data(replace(CONFIG, data=replace(CONFIG.data, train_fraction=0.8)), TOKENIZER)
    report = describe_preferences(data)
    assert (report["train_pairs"], report["validation_pairs"], report["duplicate_pairs"]) == (4, 1, 1)
    assert (report["contradictions"], report["prompts"], report["shared_prompts"]) == (3, 2, 1)
    assert report["longer_chosen"] == pytest.approx(2 / 5)
    assert report["lengths"]["chosen"]["max"] == len("five") + 1
    assert "windows" not in report["source"]


def test_messages_that_the_template_omits_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations have the same warning: otherwise, a model may learn without the text of its system messages."""
    monkeypatch.chdir(tmp_path)
    own = talker(8, end=False).tokenizer
    begin = "{% for m in messages %}{% if m.role != 'system' %}"
    turn = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    start = "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    own.special = SpecialTokens({}, {"chat_template": begin + turn + start})
    write(GOOD, GOOD | {"prompt": "3?", "system": "Be brief."})
    source = open_data(CONFIG, own).source
    assert "; warning: the chat template omits 1 message of the role system (first: pairs.jsonl, line 2)" in source
