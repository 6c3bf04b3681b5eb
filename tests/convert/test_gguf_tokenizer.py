"""Tokenizers of GGUF files: the ids of llama.cpp, special tokens, chat templates, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_files import ADDED, BPE, BPE_TOKENS, SPM, SPM_TOKENS, TEXTS, TOKENIZERS, convert
from llamacpp_values import RECORDED, source

import jaxgpt
from jaxgpt.convert.export_model import export_model
from jaxgpt.convert.gguf.special import read_special_tokens
from jaxgpt.convert.gguf.tokenizer import read_tokenizer
from jaxgpt.convert.import_model import import_model
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm.arguments import encode_prompt

pytest.importorskip("gguf")

WORDS = json.loads(RECORDED.read_text())["words"]
COMBINING = "\u0939\u093f"  # llama.cpp's pattern for tekken does not join a letter to its combining mark


def read(tokenizer: dict[str, Any], **more: Any) -> Any:
    """Read a tokenizer after replacing metadata of its vocabulary; None removes a key."""
    values = tokenizer | {f"tokenizer.ggml.{name}": value for name, value in more.items()}
    return read_tokenizer({name: value for name, value in values.items() if value is not None}, "m.gguf")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_equal_llama_cpp_s(name: str) -> None:
    tokenizer = read(TOKENIZERS[name])
    for text, ids in zip(TEXTS, WORDS[name], strict=True):
        if name == "tekken" and COMBINING in text:
            continue
        assert tokenizer.encode(text).tolist() == ids, text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_decoding_restores_the_text(name: str) -> None:
    tokenizer = read(TOKENIZERS[name])
    for text in TEXTS:
        has_added = any(token in text for token in ADDED)  # a space precedes the text after an added token
        if "\u2581" not in text and not (name == "spm" and has_added):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pre_tokenizers_differ() -> None:
    names = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "deepseek-coder")
    assert len({json.dumps(WORDS[name]) for name in names}) == len(names)


def test_a_word_in_the_vocabulary_of_llama_3_needs_no_merges() -> None:
    tokens = [*BPE_TOKENS, "xyz"]
    types = [*BPE["tokenizer.ggml.token_type"], 1]
    whole = read(BPE, pre="llama-bpe", tokens=tokens, token_type=types)
    merged = read(BPE, pre="qwen2", tokens=tokens, token_type=types)
    assert whole.encode("xyz").tolist() == [len(BPE_TOKENS)]
    assert len(merged.encode("xyz")) == 3


# Vocabulary, changed metadata, and (tokens before a text, tokens after a text).
ENDS = {
    "default of GPT-2": (BPE, {}, ([], [])),
    "default of Llama 3": (BPE, {"pre": "llama-bpe"}, ([1], [])),
    "default of OLMo 2": (BPE, {"pre": "dbrx"}, ([], [])),
    "default of SentencePiece": (SPM, {}, ([1], [])),
    "ids of SentencePiece": (SPM, {"bos_token_id": None, "eos_token_id": None, "add_eos_token": True}, ([1], [2])),
    "no bos": (SPM, {"add_bos_token": False}, ([], [])),
    "both": (BPE, {"add_bos_token": True, "add_eos_token": True}, ([1], [0])),
    "unknown bos": (BPE, {"add_bos_token": True, "bos_token_id": None}, ([], [])),
}


@pytest.mark.parametrize("case", ENDS)
def test_tokens_around_a_text(case: str) -> None:
    vocabulary, metadata, (before, after) = ENDS[case]
    tokenizer = read(vocabulary, **metadata)
    ids = tokenizer.encode("ab").tolist()
    assert tokenizer.library.encode("ab").ids == [*before, *ids, *after]
    assert list(tokenizer.bos_ids) == before


def test_special_tokens() -> None:
    special = read_special_tokens(
        SPM | {"tokenizer.ggml.padding_token_id": 5, "tokenizer.chat_template": "{{ x }}"}, ""
    )
    end_of_turn = SPM_TOKENS.index("<end_of_turn>")
    assert special.generation == {"bos_token_id": 1, "pad_token_id": 5, "eos_token_id": [2, end_of_turn]}
    assert special.names == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<0x02>", "unk_token": "<unk>"}
    assert special.chat_template == "{{ x }}"


def test_named_ends_of_a_turn() -> None:
    special = read_special_tokens(BPE | {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}, "")
    assert special.end_ids == (0, 7, 8)


def test_a_name_in_a_text_becomes_no_control_token() -> None:
    tokenizer = read(SPM)
    text = "<end_of_turn></s><0x41>"
    control = {SPM_TOKENS.index(name) for name in ("<end_of_turn>", "</s>", "<0x41>")}
    assert not control & set(tokenizer.encode(text).tolist())
    assert tokenizer.encode_special("<end_of_turn>").tolist() == [SPM_TOKENS.index("<end_of_turn>")]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_control_token_is_not_merged_from_its_parts() -> None:
    types = list(SPM["tokenizer.ggml.token_type"])
    types[SPM_TOKENS.index("ab")] = 3
    tokenizer = read(SPM, token_type=types, add_space_prefix=False)
    assert tokenizer.encode("ab").tolist() == [SPM_TOKENS.index("a"), SPM_TOKENS.index("b")]


def test_a_merge_may_begin_with_a_space() -> None:
    tokens = [*BPE_TOKENS, " a", " aB"]
    types = [*BPE["tokenizer.ggml.token_type"], 1, 1]
    assert read(BPE, tokens=tokens, token_type=types, merges=[" a B"]).vocab_size == len(tokens)


def test_padding_has_no_text() -> None:
    for vocabulary, tokens in ((BPE, BPE_TOKENS), (SPM, SPM_TOKENS)):
        has_text = read(vocabulary).has_text(len(tokens) + 3)
        assert [tokens[i] for i in range(len(tokens)) if not has_text[i]] == ["[PAD9]"]
        assert not has_text[len(tokens) :].any()


def test_scores_give_the_order_of_merges() -> None:
    """The higher score is merged first; with equal scores, the lower id."""
    base = SPM["tokenizer.ggml.scores"]
    for ab, bc, expected in ((-1.0, -2.0, "ab"), (-2.0, -1.0, "bc"), (-1.0, -1.0, "ab")):
        scores = [-9.0 for _ in base]
        scores[SPM_TOKENS.index("ab")] = ab
        scores[SPM_TOKENS.index("bc")] = bc
        tokens = list(SPM_TOKENS)
        tokens[tokens.index("abc")] = "unused"
        tokenizer = read(SPM, scores=scores, tokens=tokens, add_space_prefix=False)
        assert SPM_TOKENS.index(expected) in tokenizer.encode("abc").tolist()


def test_chat_and_export_use_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    """Gemma's kind: SentencePiece without a space before a text, added tokens and a template."""
    template = "{{ bos_token }}{% for m in messages %}<tag>{{ m.content }}<end_of_turn>{% endfor %}"
    metadata = SPM | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.chat_template": template}
    convert(source("llama", tmp_path), tmp_path / "m.gguf", metadata)
    import_model(tmp_path / "m.gguf", tmp_path / "run")
    lm = jaxgpt.load(tmp_path / "run")
    turn = [SPM_TOKENS.index(name) for name in ("<tag>", "ab", "<end_of_turn>")]
    assert encode_prompt(lm.tokenizer, lm.config.model.vocab_size, "<s><tag>ab<end_of_turn>", special=True) == [
        1,
        *turn,
    ]
    reply = jaxgpt.chat(lm, [{"role": "user", "content": "ab"}], temperature=0, max_new_tokens=3)
    assert len(reply.ids) <= 3
    export_model(tmp_path / "run", tmp_path / "hf")
    exported = load_tokenizer(tmp_path / "hf")
    end_of_turn = turn[-1]
    assert exported.end_ids == (end_of_turn, 2), "the end of the turn is first"
    assert exported.special.tokenizer == lm.tokenizer.special.tokenizer
    assert [exported.encode(text).tolist() for text in TEXTS] == [lm.tokenizer.encode(text).tolist() for text in TEXTS]


def test_a_given_tokenizer_keeps_the_ids_and_the_template_of_the_file(tmp_path: Path) -> None:
    words = SPM | {"tokenizer.ggml.model": "t5", "tokenizer.chat_template": "{{ messages }}"}
    convert(source("llama", tmp_path), tmp_path / "m.gguf", words)
    (tmp_path / "tokenizer.json").write_text(make_tokenizer("bpe", "abc", 300).to_json())
    import_model(tmp_path / "m.gguf", tmp_path / "run", str(tmp_path / "tokenizer.json"))
    special = jaxgpt.load(tmp_path / "run").tokenizer.special
    assert (special.end_ids[0], special.bos_id, special.chat_template) == (2, 1, "{{ messages }}")


def test_a_file_of_gpt_2_without_a_pre_tokenizer() -> None:
    for name in (None, "default"):
        tokenizer = read(BPE | {"general.architecture": "gpt2"}, pre=name)
        assert tokenizer.encode(TEXTS[5]).tolist() == WORDS["gpt-2"][5]


def test_minus_one_is_no_token() -> None:
    """The tool that converts llama2.c's models to GGUF writes -1 for the missing padding token."""
    tokenizer = read(SPM, padding_token_id=2**32 - 1)
    assert tokenizer.special.generation == read(SPM).special.generation
    assert "pad_token" not in tokenizer.special.names


GGML = "tokenizer.ggml."
# Vocabulary, changed metadata, and a part of the error.
REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "kind": (SPM, {"model": "t5"}, "model 't5' is not supported: expected gpt2 or llama; pass .* with --tokenizer"),
    "no kind": (SPM, {"model": None}, "model None is not supported"),
    "odd kind": (SPM, {"model": [1]}, r"model \[1\] is not supported"),
    "words": (BPE, {"pre": "odd"}, "pre 'odd' is not supported: expected one of gpt-2, .*--tokenizer"),
    "no words": (BPE | {"general.architecture": "llama"}, {"pre": None}, "pre 'default' is not supported"),
    "bytes that are no character": (
        BPE,
        {"model": "rwkv", "tokens": ["a", "b", "\\xff"], "token_type": [1, 1, 1], "scores": []},
        "model 'rwkv' is supported only for characters and bytes",
    ),
    "no tokens": (BPE, {"tokens": []}, "no tokens in tokenizer.ggml.tokens"),
    "a token twice": (BPE, {"tokens": [*BPE_TOKENS[:-1], "a"]}, "duplicate token 'a'"),
    "types": (SPM, {"token_type": [1, 2]}, "token_type has 2 values for 288 tokens"),
    "scores": (SPM, {"scores": [1.0]}, "scores has 1 values for 288 tokens"),
    "no merges": (
        {key: value for key, value in BPE.items() if not key.endswith("merges")},
        {},
        "no tokenizer.ggml.merges, which a byte-level BPE needs; .*--tokenizer",
    ),
    "numbers": (BPE, {"merges": [1, 2]}, "merges must be an array of type str"),
    "one token": (BPE, {"merges": ["ab"]}, "'ab' in tokenizer.ggml.merges is not two tokens"),
    "half a merge": (BPE, {"merges": ["a "]}, "'a ' in tokenizer.ggml.merges is not two tokens"),
    "unknown merge": (BPE, {"merges": ["a xq"]}, "cannot process this file"),
    "id": (BPE, {"bos_token_id": 99999}, "bos_token_id must be an id below 433: 99999"),
    "end id": (SPM, {"eos_token_id": "2"}, "eos_token_id must be an id below 288: '2'"),
    "flag": (SPM, {"add_bos_token": 1}, "add_bos_token must be true or false: 1"),
    "infinite": (SPM, {"scores": [float("nan")] * 288}, "scores must be finite numbers"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_is_wrong_is_named(case: str) -> None:
    vocabulary, metadata, message = REJECTED[case]
    with pytest.raises(UserError, match=message) as e:
        read(vocabulary, **metadata)
    assert "\n" not in str(e.value)
