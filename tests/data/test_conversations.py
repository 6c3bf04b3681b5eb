"""Conversations: ids and targets, packing, and rejected files."""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import llama_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from test_chat_template import MARKED, PUBLISHED, SYSTEM, TALK, VARIABLES
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxgpt.data.batches import Batches
from jaxgpt.data.chat.encoding import ChatFormat
from jaxgpt.data.chat.files import check_records
from jaxgpt.data.chat.records import CONVERSATIONS, read_record
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.conversations import (
    Conversation,
    encode_conversation,
    load_conversations,
    pack_conversations,
)
from jaxgpt.data.packing import Packed
from jaxgpt.data.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

NAMES = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|assistant|>"]


def tokenizer(template: str | None, kind: str = "bytes") -> SubwordTokenizer:
    text = MARKED + json.dumps(TALK) + "Hello. Zażółć 👋<|im_end|> system user assistant\n" * 9
    own = ByteTokenizer() if kind == "bytes" else make_tokenizer("bpe", text, 300, 0)
    library = HFTokenizer.from_str(own.to_json())
    library.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    made = SubwordTokenizer(library)
    special = {"chat_template": template} if template else {}
    made.special = SpecialTokens(
        {"eos_token_id": library.token_to_id("</s>")}, special | {"bos_token": "<s>", "eos_token": "</s>"}
    )
    return made


def encode(value: Any, own: Tokenizer) -> Conversation:
    source = own.special.chat_template
    form = ChatFormat(ChatTemplate(source, VARIABLES), own) if source else None
    [found] = encode_conversation(read_record(value), own, form)
    return found


def load(path: Path, own: Tokenizer, window: int = 256, **data: Any) -> tuple[Packed, Packed, str, str]:
    """Load the conversations of a file, with all of them for training by default."""
    section = DataConfig(path=str(path), tokenizer="byte", **{"train_fraction": 1.0} | data)
    return load_conversations(Config(model=ModelConfig(block_size=window), data=section), own)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_ids_and_mask_equal_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    own = tokenizer(MARKED, kind)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=HFTokenizer.from_str(own.to_json()), **VARIABLES)
    for talk in (TALK, [SYSTEM, *TALK], TALK[:2], TALK[:3]):
        expected = theirs.apply_chat_template(
            talk, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, trained = encode({"messages": talk}, own)
        n = len(ids)
        assert ids.tolist() == expected["input_ids"][:n]
        assert trained.tolist() == list(map(bool, expected["assistant_masks"][:n]))
        assert 0 < trained.sum() < n
        assert trained[-1]
        assert not any(expected["assistant_masks"][n:]), "only the text after the last answer is omitted"


def test_a_prompt_and_a_completion() -> None:
    """Pairs become two messages with a template; without a template they are concatenated, followed by the end id."""
    value = {"prompt": "2 + 2 = </s>", "completion": "4"}
    own = tokenizer(None)
    ids, trained = encode(value, own)
    assert own.decode(ids) == "2 + 2 = </s>4</s>"
    assert trained.tolist() == [False] * 12 + [True] * 2
    assert (ids == own.eos_id).tolist() == [False] * 13 + [True], "a name in a prompt is text"
    ids, trained = encode(value, tokenizer(MARKED))
    assert own.decode(ids) == "<|im_start|>user\n2 + 2 = </s><|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    assert own.decode(ids[trained]) == "4<|im_end|>"
    spaced = SubwordTokenizer(HFTokenizer.from_str(json.dumps(llama_tokenizer())))
    ids, trained = encode({"prompt": "ab", "completion": " a"}, spaced)
    assert ids[:-1].tolist() == spaced.encode("ab a").tolist(), "no second space"
    assert trained.sum() == 2
    assert encode({"prompt": "w", "completion": "x"}, WordTokenizer(["w", "x"])).ids.tolist() == [0, 1]
    letters = CharTokenizer("abc")
    assert letters.decode(encode({"prompt": "a", "completion": "bc"}, letters).ids) == "abc"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_white_space_of_an_answer_is_inside_if_the_tokenizer_trims_offsets(kind: str) -> None:
    """The tokenizers of GPT-NeoX and Llama 3 trim offsets."""
    own = tokenizer(MARKED, kind)
    value = json.loads(own.to_json())
    value["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    trimming = SubwordTokenizer(HFTokenizer.from_str(json.dumps(value)))
    trimming.special = own.special
    for answer in ("    return x", "\n\n\tif a:\n        b", " \U0001f642  "):
        talk = {"messages": [{"role": "user", "content": " Q "}, {"role": "assistant", "content": answer}]}
        ids, trained = encode(talk, trimming)
        assert own.decode(ids[trained]) == f"{answer}<|im_end|>"
        assert all(map(np.array_equal, (ids, trained), encode(talk, own)))


def test_a_prompt_has_the_start_id_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = CharTokenizer("^ab")
    monkeypatch.setattr(CharTokenizer, "bos_ids", tuple(own.encode("^").tolist()))
    for prompt in ("a", "^a"):
        ids, trained = encode({"prompt": prompt, "completion": "b"}, own)
        assert own.decode(ids) == "^ab"
        assert own.decode(ids[trained]) == "b"


def test_a_date_in_a_template_is_always_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    dated = "{{ strftime_now('%d %b %Y') }}" + MARKED
    train, *_ = load(path, tokenizer(dated))
    assert tokenizer(dated).decode(train.take(0, 11)) == "26 Jul 2024"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(TALK).text != "2024"


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["", "byte-order mark"])
def test_a_single_conversation_is_trained_on(mark: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(mark + json.dumps({"prompt": "a", "completion": "bc"}).encode())
    train, val, source, _ = load(path, CharTokenizer("abc"), 8, train_fraction=0.9)
    assert (train.window_count(8), val.window_count(8)) == (1, 0)
    assert train.take(0, 3).tolist() == [0, 1, 2]
    assert source.startswith("1 conversation with 1 answer in ")
    path.write_text(json.dumps({"prompt": "", "completion": "bc"}))
    *_, source, _ = load(path, CharTokenizer("abc"), 8)
    assert source.startswith("1 conversation with 1 answer in "), "an answer without a prompt"


lengths = st.lists(st.integers(1, 20), max_size=60)


@given(lengths, st.integers(0, 2**31 - 1))
def test_a_batch_holds_whole_conversations(sizes: list[int], seed: int) -> None:
    """Every epoch has each window once; inputs, targets and segments of a window match its conversations."""
    rng = np.random.default_rng(seed)
    talks = [Conversation(rng.integers(0, 99, n + 1, np.int32), rng.random(n + 1) < 0.5) for n in (*sizes, 20)]
    packed = pack_conversations(talks, 20)
    train = TrainConfig(batch_size=packed.window_count(20), seed=seed)
    batches = Batches.of(Config(model=ModelConfig(block_size=20), train=train), packed)
    rows = batches.at(0)[:]
    assert rows.shape == (batches.per_epoch, 20, 3)
    assert (Batches(packed, 20, 1, seed, stride=1).at(0)[:] == rows[:1]).all(), "a function of seed and step"
    found = [row[row[:, 2] == s] for row in rows for s in range(row[:, 2].max() + 1)]
    expected = [(t.ids[:-1].tolist(), np.where(t.is_target[1:], t.ids[1:], -1).tolist()) for t in talks]
    assert sorted((f[:, 0].tolist(), f[:, 1].tolist()) for f in found) == sorted(expected)
    padding = rows[rows[..., 2] < 0]
    assert (padding == [0, -1, -1]).all()
    assert packed.fill(20) == pytest.approx(1 - len(padding) / rows[..., 0].size)


def test_long_conversations_are_cut_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    talks = [("q", "short"), ("q", "long" * 20), ("question" * 9, "never reached"), ("q", "last")]
    path.write_text("\n\n".join(json.dumps({"prompt": q, "completion": a}) for q, a in talks))
    own = tokenizer(None)
    train, val, source, _ = load(path, own, 40, train_fraction=0.7)
    ids = [each.take(a, n + 1) for each in (train, val) for a, n in sorted(zip(each.begins, each.lengths, strict=True))]
    assert [own.decode(each) for each in ids] == ["qshort</s>", "q" + "long" * 10, "qlast</s>"]
    assert source.startswith(
        f"3 conversations with 3 answers in {path}; loss on 100.0% of the tokens; windows 57.5% full; 1 truncated to"
    )
    assert " 41 tokens; 1 skipped without assistant tokens among the first 41; 1 held out, fewer than 20" in source


@pytest.mark.parametrize("section", ["data", "model"])
def test_the_advice_for_short_windows_names_the_setting_in_force(section: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "question", "completion": "answer"}))
    window = 4 if section == "data" else 0
    config = Config(
        model=ModelConfig(block_size=99 if window else 4),
        data=DataConfig(path=str(path), tokenizer="byte", window=window),
    )
    flag = {"data": "--data.window", "model": "--model.block-size"}[section]
    with pytest.raises(UserError, match=rf"has assistant tokens among its first 5 \(.* 4\): raise {flag}$"):
        load_conversations(config, tokenizer(None))


GOOD = json.dumps({"messages": TALK})
BAD = {
    "": "has no conversations; write one per line",
    '{"messages": [': r"line 2: not valid JSON .*column 15",
    "[1]": "line 2: a conversation must be an object, not .1.: write .*",
    '{"text": "a"}': "line 2: no known shape: the fields are .'text'.; use one of .*, use jaxgpt data prepare",
    '{"messages": []}': "line 2: messages must be a list such as",
    '{"messages": [{"role": "user", "content": "Hi"}]}': r"line 2: no message has the role assistant.*roles are \['user'\]",
    "\xff": "line 2: not valid JSON",
    json.dumps({"messages": TALK, "tools": "f"}): "line 2: the field 'tools' is a string, but not valid JSON",
    json.dumps({"messages": [*TALK[:3], TALK[3] | {"weight": 0.5}]}): "line 2: message 4 has the weight 0.5: use 1, or",
}


@pytest.mark.parametrize("line", BAD)
def test_a_file_that_is_not_of_conversations_is_one_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes((GOOD + "\n" + line).encode("latin-1") if line else b"\n")
    with pytest.raises(UserError, match=BAD[line]) as caught:
        load(path, tokenizer(MARKED))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_templates_that_cannot_be_trained_on_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD)
    forgets = "{% for m in messages %}{{ m.role + ':' + (m.content if loop.last else '...') + '\n' }}{% endfor %}"
    for template, said in (
        (forgets, "text in message 2 cannot be located: the chat template changes earlier text"),
        (None, "messages need a chat template, which the model lacks"),
    ):
        with pytest.raises(UserError, match=f"a.jsonl, line 1: .*{said}"):
            load(path, tokenizer(template))
    path.write_text(json.dumps({"messages": TALK[1:]}))
    with pytest.raises(UserError, match="the first message has the role assistant"):
        load(path, tokenizer(PUBLISHED["llama-3"]))


def test_text_that_the_template_adds_to_answers_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD)
    source = (
        "{% for m in messages %}{{ m.role + ':' + ('ok ' if m.role == 'assistant' else '') + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    _, _, note, _ = load(path, tokenizer(source))
    assert "; the chat template adds 'ok ' to answers, a target" in note


def test_messages_of_weight_0_are_not_targets() -> None:
    for template in (MARKED, PUBLISHED["llama-3"]):
        own = tokenizer(template)
        _, all_targets = encode({"messages": TALK}, own)
        first, second = (each for each in TALK if each["role"] == "assistant")
        unweighted = [each | {"weight": 0} if each is first else each for each in TALK]
        ids, is_target = encode({"messages": unweighted}, own)
        assert own.decode(ids[is_target]).startswith(second["content"])
        assert (is_target <= all_targets).all()
        assert first["content"] not in own.decode(ids[is_target])


def pair(number: int) -> str:
    return json.dumps({"prompt": f"question {number}", "completion": f"answer {number}"})


def write_pairs(path: Path, numbers: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(pair, numbers)))


def shown(split: Packed) -> list[int]:
    """Return the numbers of the pairs of a split, sorted."""
    own = tokenizer(None)
    ends = zip(split.begins, split.lengths, strict=True)
    return sorted(int(own.decode(split.take(a, n)).split()[-1]) for a, n in ends)


def test_the_fingerprint_of_a_file_is_its_sha256(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_pairs(path, range(5))
    *_, fingerprint = load(path, tokenizer(None))
    assert fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_leading_conversations_are_for_training(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_pairs(path, range(100))
    train, val, source, _ = load(path, tokenizer(None), train_fraction=0.9)
    assert shown(train) == [*range(90)]
    assert shown(val) == [*range(90, 100)]
    assert source.endswith("; 10 held out, fewer than 20: hold out more to compare runs by their loss")
    *_, source, _ = load(path, tokenizer(None), train_fraction=0.8)
    assert "held out" not in source
    *_, source, _ = load(path, tokenizer(None))
    assert "held out" not in source


def test_copies_of_training_conversations_are_not_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*map(pair, range(60)), *map(pair, range(50, 90))]))
    train, val, source, _ = load(path, tokenizer(None), train_fraction=0.5)
    assert shown(train) == [*range(50)]
    assert shown(val) == sorted([*range(50, 60), *range(50, 90)])
    assert "not held out" not in source
    train, val, source, _ = load(path, tokenizer(None), train_fraction=0.6)
    assert shown(train) == [*range(60)]
    assert shown(val) == [*range(60, 90)]
    assert "; 10 not held out, because they are also among the training conversations" in source


def test_a_directory_with_validation_files(tmp_path: Path) -> None:
    write_pairs(tmp_path / "data" / "train-00001.jsonl", range(2, 4))
    write_pairs(tmp_path / "data" / "train-00000.jsonl", range(2))
    write_pairs(tmp_path / "validation" / "a.json", range(4, 6))
    write_pairs(tmp_path / "test.jsonl", range(6, 8))
    (tmp_path / "README.md").write_text("Data")
    train, val, source, fingerprint = load(tmp_path, tokenizer(None))
    assert shown(train) == [0, 1, 2, 3]
    assert shown(val) == [4, 5]
    assert f"6 conversations with 6 answers in {tmp_path}; " in source
    assert f"; 1 file not used, such as {tmp_path / 'test.jsonl'}" in source
    write_pairs(tmp_path / "test.jsonl", range(9))
    *_, same = load(tmp_path, tokenizer(None))
    assert same == fingerprint
    write_pairs(tmp_path / "validation" / "a.json", range(9))
    *_, changed = load(tmp_path, tokenizer(None))
    assert changed != fingerprint


def test_a_directory_without_names_of_splits(tmp_path: Path) -> None:
    for number in range(4):
        write_pairs(tmp_path / f"part-{number}.jsonl", range(5 * number, 5 * number + 5))
    train, val, *_ = load(tmp_path, tokenizer(None), train_fraction=0.5)
    assert shown(train) == [*range(10)]
    assert shown(val) == [*range(10, 20)]


def test_unusable_records_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = [
        pair(9)[:20],
        pair(9)[:21],
        '{"text": "a"}',
        '{"prompt": "\\ud83d", "completion": "9"}',
        pair(1).replace("}", ', "score": NaN, "id": "\\ud83d"}'),
    ]
    path.write_text("\n".join([pair(0), *bad, pair(2)]))
    train, _, source, _ = load(path, tokenizer(None), on_error="skip")
    assert shown(train) == [0, 1, 2]
    assert f"; skipped 4 records: 2 unreadable (first: {path}, line 2: not valid JSON" in source
    assert f"1 of an unknown shape (first: {path}, line 4: no known shape" in source
    assert f"1 that cannot be encoded (first: {path}, line 5: the text has '\\ud83d'" in source
    with pytest.raises(
        UserError, match=r"a.jsonl, line 2: not valid JSON .*; to skip such .*, use --data.on-error skip"
    ):
        load(path, tokenizer(None))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rejected_answers_of_preference_data_are_not_trained_on(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    rows = [json.loads(pair(n)) | {"label": n != 1} for n in range(3)]
    place = "line 2"
    if name == "a.jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        place = "row 1"
    with pytest.raises(UserError, match=f"{place}: the label False marks a rejected answer"):
        load(path, tokenizer(None))
    train, _, source, _ = load(path, tokenizer(None), on_error="skip")
    assert shown(train) == [0, 2]
    assert "skipped 1 record: 1 with a rejected answer" in source


def test_messages_that_the_template_omits_are_reported(tmp_path: Path) -> None:
    """The template has no place for the system message or results of tools; answers are trained on without them."""
    path = tmp_path / "a.jsonl"
    user, answer, *_ = TALK
    results = [user, answer, {"role": "tool", "content": "22 degrees"}, answer]
    talks = [[user, answer], [SYSTEM, user, answer], results, [SYSTEM, *results]]
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    turn = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    start = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    some = (
        f"{{% for m in messages %}}{{% if m.role in ('user', 'assistant') %}}{turn}{{% endif %}}{{% endfor %}}{start}"
    )
    counts = "2 messages of the role system, 2 messages of the role tool"
    source = load(path, tokenizer(some))[2]
    assert f"; warning: the chat template omits {counts} (first: {path}, line 2): write" in source
    every = f"{{% for m in messages %}}{turn}{{% endfor %}}{start}"
    loud = every.replace("m.content", "m.content | upper")
    path.write_text(json.dumps({"messages": [SYSTEM, user, answer]}))
    # As in Mistral 7B v0.3, the system message is only in the text that chat sends.
    begin = "{% if messages[-1].role == 'user' and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    in_prompt = begin + some
    for complete in (every, loud, in_prompt):
        assert "warning" not in load(path, tokenizer(complete))[2]


def test_messages_of_unknown_roles_are_reported(tmp_path: Path) -> None:
    """The template accepts any role, but only messages of the assistant are targets."""
    path = tmp_path / "a.jsonl"
    user, answer, *_ = TALK
    known = [{"role": "developer", "content": "Be brief."}, user, answer, {"role": "ipython", "content": "1"}, answer]
    talks = [known, [user, answer, user, answer | {"role": "gpt4"}], [user, answer, {"role": "Ann", "content": "Hi"}]]
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    every = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    source = load(path, tokenizer(every))[2]
    expected = f"; warning: 2 messages of unknown roles are not trained on (first: 'gpt4' in {path}, line 2): rename"
    assert expected in source
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks[:2]))
    expected = f"; warning: 1 message of an unknown role is not trained on (first: 'gpt4' in {path}, line 2): rename"
    assert expected in load(path, tokenizer(every))[2]
    path.write_text(json.dumps({"messages": known}))
    assert "warning" not in load(path, tokenizer(every))[2]


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_conversations_with_the_label_false_are_reported(on_error: str, tmp_path: Path) -> None:
    """KTO data in LLaMA-Factory and ms-swift have this form; the label may also describe the conversation."""
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"messages": TALK, "label": n % 2 == 0}) for n in range(5)]
    path.write_text("\n".join(rows))
    train, _, source, _ = load(path, tokenizer(MARKED), on_error=on_error)
    assert len(train.lengths) == 5
    assert (
        f"; warning: 2 conversations with the label false or 0 (first: {path}, line 2): remove these records if"
        in source
    )
    path.write_text("\n".join(rows[::2]))
    assert "warning" not in load(path, tokenizer(MARKED), on_error=on_error)[2]


def test_a_file_without_any_usable_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("<html>\n</html>")
    expected = "a.jsonl has no conversations; skipped 2 records: 2 unreadable .*line 1: not valid JSON"
    with pytest.raises(UserError, match=expected):
        load(path, tokenizer(None), on_error="skip")
    with pytest.raises(UserError, match=expected):
        check_records(path, CONVERSATIONS, "skip")


def test_unusable_training_files_are_not_mended_by_good_validation_files(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("<html>\n")
    (tmp_path / "val.jsonl").write_text(pair(0))
    with pytest.raises(UserError, match=r"has no conversations; skipped 1 record: 1 unreadable"):
        load(tmp_path, tokenizer(None), on_error="skip")


def test_a_missing_library_is_no_unreadable_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.jsonl").write_text(pair(0))
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"b\.parquet needs the package pyarrow: pip install"):
        load(tmp_path, tokenizer(None), on_error="skip")


def test_the_check_finds_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_pairs(path, range(50))
    check_records(path, CONVERSATIONS)
    path.write_text(path.read_text() + '\n{"text": "a"}')
    check_records(path, CONVERSATIONS, "skip")
    with pytest.raises(UserError, match="line 51: no known shape"):
        check_records(path, CONVERSATIONS)


def test_the_prompt_and_the_answer_of_the_first_conversation() -> None:
    targets = [False, False, True, True, False, True]
    talks = [
        Conversation(np.arange(6, dtype=np.int32), np.array(targets)),
        Conversation(*encode({"messages": TALK}, tokenizer(MARKED))),
    ]
    packed = pack_conversations(talks, 500)
    assert packed.prompt().tolist() == [0, 1]
    assert packed.answer().tolist() == [2, 3]
    ends_with_a_target = pack_conversations(
        [Conversation(np.arange(3, dtype=np.int32), np.array([False, True, True]))], 9
    )
    assert ends_with_a_target.answer().tolist() == [1, 2]


def test_conversations_without_a_target_are_an_error(tmp_path: Path) -> None:
    """A longer window would not help."""
    path = tmp_path / "a.jsonl"
    answer = {"role": "assistant", "content": "Hi", "weight": 0}
    path.write_text(json.dumps({"messages": [SYSTEM, TALK[0], answer]}))
    with pytest.raises(UserError, match=r"a\.jsonl has no target: all answers have the weight 0"):
        load(path, tokenizer(MARKED))


def test_fine_tuning_says_that_the_end_of_a_turn_is_unknown(tmp_path: Path) -> None:
    """The template accepts only conversations that begin with a word."""
    source = "{% if 'Hi' not in messages[0].content %}{{ raise_exception('say Hi') }}{% endif %}" + MARKED
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    assert "warning" not in load(path, tokenizer(MARKED))[2]
    expected = "; warning: the end of a turn cannot be derived from the chat template: answers may not stop"
    assert load(path, tokenizer(source))[2].count(expected) == 1
