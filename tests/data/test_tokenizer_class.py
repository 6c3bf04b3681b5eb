"""Options of transformers' tokenizer classes: AutoTokenizer computes the same ids, regardless of tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from folders import llama_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxgpt.data.chat.encoding import ChatFormat
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.tokenizers.files import load_saved_tokenizer, load_tokenizer, save_tokenizer
from jaxgpt.lm.arguments import encode_prompt

NAMES = ("<|im_start|>", "<|im_end|>")
TEXTS = ("a b", " ab", "  a  b", "<s>a b<|im_end|> a b<|im_start|>b<|im_end|>\u00e9")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}


def sentencepiece(spaces: str) -> dict[str, Any]:
    """Return a tokenizer.json of Llama 2's kind, with spaces from a normalizer or from Metaspace."""
    value = llama_tokenizer(NAMES)
    if spaces == "replace":
        value["normalizer"] = value["normalizer"]["normalizers"][1]
    elif spaces != "prepend":
        value["normalizer"] = None
        value["pre_tokenizer"] = metaspace(spaces)
    return value


def write(folder: Path, tokenizer_json: Any, config: dict[str, Any], model_type: str = "llama") -> Path:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("spaces", ["prepend", "replace", "first", "always", "never"])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer"])
def test_texts_have_the_ids_of_transformers(name: str, spaces: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    random = Random(name + spaces)
    options = {"add_prefix_space": random.choice([True, False, None]), "legacy": random.choice([True, False])}
    given = dict(random.sample(sorted(options.items()), random.randrange(3)))
    folder = write(tmp_path, sentencepiece(spaces), {"tokenizer_class": name} | given)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode_special(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("adds_space", [True, False])
def test_prompts_and_chats_have_the_ids_of_transformers(adds_space: bool, legacy: bool, tmp_path: Path) -> None:
    """The ids are equal to transformers' ids before and after the tokenizer is saved with a run."""
    transformers = pytest.importorskip("transformers")
    options = {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": adds_space, "legacy": legacy}
    source = tmp_path / "source"
    source.mkdir()
    theirs = transformers.AutoTokenizer.from_pretrained(write(source, sentencepiece("prepend"), options))
    save_tokenizer(tmp_path, load_tokenizer(source))
    ours = load_saved_tokenizer(tmp_path / "tokenizer.json")
    assert encode_prompt(ours, ours.vocab_size, "a b") == theirs("a b").input_ids

    form = ChatFormat(ChatTemplate(TEMPLATE), ours)
    user = {"role": "user", "content": "a b"}
    answer = {"role": "assistant", "content": " ab"}
    chat = theirs.apply_chat_template([user, answer], chat_template=TEMPLATE, tokenize=False)
    ids = theirs(chat, add_special_tokens=False).input_ids
    [encoded] = form.encode([user, answer])
    assert encoded.ids.tolist() == ids
    answer_begins = ids.index(ids[0], 1) + 1  # after the second <|im_start|>
    assert form.prompt_ids([user]) == ids[:answer_begins]


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, "first"),
        ({"tokenizer_class": "LlamaTokenizer", "legacy": True}, "always"),
        ({"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_prefix_space": False}, "never"),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": None}, "first"),
        ({"tokenizer_class": "CodeLlamaTokenizer", "legacy": True}, "first"),
        ({"tokenizer_class": "CodeLlamaTokenizer", "add_prefix_space": False}, "never"),
    ],
)
def test_the_class_decides_where_a_space_is_prepended(options: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    value = json.loads(load_tokenizer(write(tmp_path, sentencepiece("prepend"), options)).to_json())
    assert (value["normalizer"], value["pre_tokenizer"]) == (None, metaspace(scheme))


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "olmo2", "mistral3", "llava"])
def test_other_models_use_tokenizer_json_as_it_is(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    folder = write(tmp_path, sentencepiece("prepend"), config, model_type)
    ids = load_tokenizer(folder).encode("a b").tolist()
    assert ids == [263, 259, 261]
    assert transformers.AutoTokenizer.from_pretrained(folder)("a b", add_special_tokens=False).input_ids == ids


@pytest.mark.parametrize("part", ["normalizer", "model", "bytes"])
def test_other_kinds_of_text_preparation_are_kept(part: str, tmp_path: Path) -> None:
    """The class of transformers would drop them, and the model would receive ids that it was not trained on."""
    value = sentencepiece("prepend")
    if part == "normalizer":
        value["normalizer"]["normalizers"].insert(0, {"type": "NFKC"})
    elif part == "model":
        value["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["\u2581", -1.0], ["a", -1.0]]}
        value["added_tokens"] = []
        value["post_processor"] = None
    else:
        value["normalizer"] = None
        value["pre_tokenizer"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
    options = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    kept = json.loads(load_tokenizer(write(tmp_path, value, options)).to_json())
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        assert kept[name] == value[name]


BYTE_LEVEL = [
    (False, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "llama", [0, 1, 0, 2]),
    (False, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "olmo2", [1, 0, 2]),
    (False, {"add_prefix_space": True}, "gpt2", [0, 1, 0, 2]),
    (True, {"add_prefix_space": False}, "olmoe", [1, 0, 2]),
    (True, {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": False}, "", [1, 0, 2]),
    (True, {"tokenizer_class": "GPTNeoXTokenizerFast"}, "", [1, 0, 2]),
    (True, {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False}, "gpt2", [0, 1, 0, 2]),
    (True, {}, "", [0, 1, 0, 2]),
]


@pytest.mark.parametrize(("stored", "config", "model_type", "expected"), BYTE_LEVEL)
def test_the_class_decides_about_the_first_space_of_byte_level_bpe(
    stored: bool, config: dict[str, Any], model_type: str, expected: list[int], tmp_path: Path
) -> None:
    """AutoTokenizer of transformers 5.24 computes the same ids."""
    library = Tokenizer(models.BPE({"\u0120": 0, "a": 1, "b": 2}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=stored)
    write(tmp_path, json.loads(library.to_str()), config, model_type)
    assert load_tokenizer(tmp_path).encode("a b").tolist() == expected


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
@pytest.mark.parametrize("name", ["GPTNeoXTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_prompts_begin_with_a_token_where_those_of_transformers_do(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """`add_bos_token` has no effect on a tokenizer.json; GPT-NeoX's class removes its beginning-of-text token."""
    transformers = pytest.importorskip("transformers")
    value = json.loads(
        Tokenizer(models.BPE({"\u0120": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4, "<unk>": 5}, [])).to_str()
    )
    value["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    value["post_processor"] = llama_tokenizer(NAMES)["post_processor"]
    value["post_processor"]["special_tokens"]["<s>"]["ids"] = [3]
    folder = write(tmp_path, value, {"tokenizer_class": name} | config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert encode_prompt(ours, ours.vocab_size, "a b") == theirs("a b").input_ids
