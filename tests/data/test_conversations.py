"""Conversations: ids and targets, packing, and rejected files."""

from __future__ import annotations

import codecs
import json
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

from jaxgpt.config import Config, ModelConfig, TrainConfig
from jaxgpt.data.batches import Batches
from jaxgpt.data.chat_template import ChatTemplate
from jaxgpt.data.conversations import Conversation, encode_conversation, load_conversations, pack_conversations
from jaxgpt.data.special import SpecialTokens
from jaxgpt.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    SubwordTokenizer,
    Tokenizer,
    WordTokenizer,
)
from jaxgpt.data.tokenizer_files import make_tokenizer
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
    [conversation] = encode_conversation(value, own, ChatTemplate(source, VARIABLES) if source else None)
    return conversation


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
    train, *_ = load_conversations(path, tokenizer(dated), 256)
    assert tokenizer(dated).decode(train.take(0, 11)) == "26 Jul 2024"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(TALK).text != "2024"


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["", "byte-order mark"])
def test_a_single_conversation_is_trained_on(mark: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(mark + json.dumps({"prompt": "a", "completion": "bc"}).encode())
    train, val, *_ = load_conversations(path, CharTokenizer("abc"), 8, 0.9)
    assert (train.starts(8), val.starts(8)) == (1, 0)
    assert train.take(0, 3).tolist() == [0, 1, 2]


lengths = st.lists(st.integers(1, 20), max_size=60)


@given(lengths, st.integers(0, 2**31 - 1))
def test_a_batch_holds_whole_conversations(sizes: list[int], seed: int) -> None:
    """Every epoch has each window once; inputs, targets and segments of a window match its conversations."""
    rng = np.random.default_rng(seed)
    talks = [Conversation(rng.integers(0, 99, n + 1, np.int32), rng.random(n + 1) < 0.5) for n in (*sizes, 20)]
    packed = pack_conversations(talks, 20)
    train = TrainConfig(batch_size=packed.starts(20), seed=seed)
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
    train, val, source, _ = load_conversations(path, own, 40, 0.7)
    ids = [each.take(a, n + 1) for each in (train, val) for a, n in sorted(zip(each.begins, each.lengths, strict=True))]
    assert [own.decode(each) for each in ids] == ["qshort</s>", "q" + "long" * 10, "qlast</s>"]
    assert source.startswith(
        f"3 conversations in {path}; loss on 100.0% of the tokens; windows 57.5% full; 1 truncated to"
    )
    assert source.endswith(" 41 tokens; 1 skipped without assistant tokens among the first 41")
    with pytest.raises(
        UserError, match=r"no conversation of .* has assistant tokens among its first 1: raise --data.window"
    ):
        load_conversations(path, tokenizer(MARKED), 0)


GOOD = json.dumps({"messages": TALK})
BAD = {
    "": "has no conversations: write one per line",
    '{"messages": [': r"line 2: not valid JSON .*column 15",
    "[1]": "line 2: neither a list of messages, nor a prompt and a completion .strings.: .1.; write .*",
    '{"text": "a"}': "line 2: neither .*; to train on documents, use jaxgpt data prepare",
    '{"messages": []}': "line 2: messages must be a list such as",
    '{"messages": [{"role": "user", "content": "Hi"}]}': "line 2: no message has the role assistant",
    "\xff": "line 2: not valid JSON",
    json.dumps({"messages": TALK, "tools": [{"name": "f"}]}): "line 2: tools are not supported",
    json.dumps({"messages": [*TALK[:3], TALK[3] | {"weight": 0}]}): "line 2: a message has a weight other than 1",
}


@pytest.mark.parametrize("line", BAD)
def test_a_file_that_is_not_of_conversations_is_one_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes((GOOD + "\n" + line).encode("latin-1") if line else b"\n")
    with pytest.raises(UserError, match=BAD[line]) as caught:
        load_conversations(path, tokenizer(MARKED), 256)
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
            load_conversations(path, tokenizer(template), 256)
    path.write_text(json.dumps({"messages": TALK[1:]}))
    with pytest.raises(UserError, match="the first message has the role assistant"):
        load_conversations(path, tokenizer(PUBLISHED["llama-3"]), 256)
    with pytest.raises(UserError, match=f"cannot read.*{tmp_path.name}"):
        load_conversations(tmp_path, tokenizer(MARKED), 256)
