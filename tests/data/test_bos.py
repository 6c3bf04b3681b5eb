"""The beginning-of-text token: one rule for windows, documents, pairs and prompts, taken from the tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxgpt.cli.final_sample import final_prompt, without_bos
from jaxgpt.config import Config, DataConfig, ModelConfig, PrepareParams
from jaxgpt.config_json import from_json, to_json
from jaxgpt.data import open_data
from jaxgpt.data.chat.records import Pair
from jaxgpt.data.conversations import encode_conversation
from jaxgpt.data.prepared import text_portions
from jaxgpt.data.prepared.index import read_index, write_index
from jaxgpt.data.prepared.prepare import prepare
from jaxgpt.data.tokenizers import cuts
from jaxgpt.data.tokenizers.bos import text_bos, with_bos
from jaxgpt.data.tokenizers.files import load_tokenizer, save_tokenizer
from jaxgpt.data.tokenizers.joined_texts import decode_texts
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import UserError
from jaxgpt.files import sha256_file
from jaxgpt.lm.arguments import encode_prompt
from jaxgpt.report.text_bytes import bytes_per_token

BOS = 257
END = 258
START = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
PROCESSORS: dict[str, Any] = {
    "none": None,
    "offsets": processors.ByteLevel(trim_offsets=True),
    "start": START,
    "offsets, then start": processors.Sequence([processors.ByteLevel(trim_offsets=False), START]),
    "start and end": processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", END)]),
    "roberta": processors.RobertaProcessing(("</s>", END), ("<s>", BOS)),
}
PREPENDING = ("start", "offsets, then start", "start and end", "roberta")
TEXT = "the quick brown fox jumps over the lazy dog. " * 20


def byte_tokenizer(processor: Any, end: str = "</s>") -> SubwordTokenizer:
    library = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, normalized=False) for name in ("<|x|>", "<s>", "</s>")])
    if processor is not None:
        library.post_processor = processor
    made = SubwordTokenizer(library)
    end_id = library.token_to_id(end)
    made.special = SpecialTokens({"bos_token_id": BOS, "eos_token_id": end_id}, {"bos_token": "<s>", "eos_token": end})
    return made


def saved(tokenizer: SubwordTokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_tokenizer(folder, tokenizer)
    return folder


def text_config(path: Path, tokenizer: Path, **data: Any) -> Config:
    model = ModelConfig(block_size=16, n_layer=1, n_head=1, n_embd=8)
    return Config(model=model, data=DataConfig(path=str(path), tokenizer=str(tokenizer), **data))


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("rule", ["auto", "yes", "no"])
def test_the_rule_is_kept_in_the_tokenizer_where_transformers_reads_it(name: str, rule: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(PROCESSORS[name])
    prepends = {"auto": name in PREPENDING, "yes": True, "no": False}[rule]
    changed = with_bos(tokenizer, rule)
    assert changed.bos_ids == text_bos(tokenizer, rule) == ((BOS,) if prepends else ())
    assert with_bos(changed, rule) is changed
    assert changed.encode("ab").tolist() == tokenizer.encode("ab").tolist()
    assert changed.special == tokenizer.special
    again = load_tokenizer(saved(changed, tmp_path / "saved"))  # type: ignore[arg-type]
    assert again.bos_ids == changed.bos_ids
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    end = [END] if name == "start and end" else [END] if name == "roberta" and rule != "no" else []
    assert theirs("ab").input_ids == [*encode_prompt(again, 259, "ab"), *end]


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe"])
def test_tokenizers_without_the_token_are_unchanged_or_one_line(kind: str) -> None:
    tokenizer = make_tokenizer(kind, TEXT, 300)
    assert with_bos(tokenizer, "auto") is with_bos(tokenizer, "no") is tokenizer
    with pytest.raises(UserError, match="no beginning-of-text token"):
        with_bos(tokenizer, "yes")


@pytest.mark.parametrize("documents", [["ab", "", "a" * 50], ["a"]])
@pytest.mark.parametrize("form", ["llm.c", "nanogpt"])
def test_each_prepared_document_begins_with_the_token(form: Any, documents: list[str], tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(START)
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    folder = saved(tokenizer, tmp_path / "tokenizer")
    index = prepare(
        [str(source)], tmp_path / "out", PrepareParams(str(folder), format=form, val_fraction=0.0, workers=1)
    )
    offset = 1024 if form == "llm.c" else 0
    [shard] = index["splits"]["train"]["shards"]
    ids = np.frombuffer((tmp_path / "out" / shard["file"]).read_bytes()[offset:], np.uint16).tolist()
    expected = []
    for text in documents:
        body = [BOS, *tokenizer.encode(text).tolist()]
        expected += [END, *body] if form == "llm.c" else [*body, END]
    assert ids == expected
    assert index["tokenizer"]["bos"] == "<s>"
    read = open_data(text_config(tmp_path / "out", folder, train_fraction=0.5)) if len(ids) > 60 else None
    assert read is None or read.source.endswith("; <s> before each document")


def test_a_text_in_pieces_begins_with_the_token_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_portions, "BLOCK", 50)
    monkeypatch.setattr(cuts, "PIECE", 20)
    (tmp_path / "a.txt").write_text(TEXT)
    folder = saved(byte_tokenizer(START), tmp_path / "tokenizer")
    index = prepare(
        [str(tmp_path / "a.txt")], tmp_path / "out", PrepareParams(str(folder), val_fraction=0.0, workers=1)
    )
    assert index["pieces"] > 5
    assert index["splits"]["train"]["tokens"] == len([END, BOS, *TEXT])


@pytest.mark.parametrize("rule", ["auto", "no", "yes"])
def test_a_token_that_both_ends_and_begins_is_not_doubled(rule: Any, tmp_path: Path) -> None:
    """In OPT's tokenizer, for example, the end-of-text id before a document is its beginning-of-text id."""
    source = tmp_path / "a.txt"
    source.write_text("ab")
    folder = saved(byte_tokenizer(START, end="<s>"), tmp_path / "tokenizer")
    index = prepare([str(source)], tmp_path / "out", PrepareParams(str(folder), bos=rule, val_fraction=0.0, workers=1))
    assert index["splits"]["train"]["tokens"] == 3


def test_each_window_of_a_text_begins_with_the_token_and_has_the_same_targets(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    folder = saved(byte_tokenizer(START), tmp_path / "tokenizer")
    config = text_config(tmp_path / "a.txt", folder)
    data = open_data(config)
    plain = open_data(replace(config, data=replace(config.data, bos="no")))
    starts = np.array([0, 5, 60])
    for with_token, without in ((data.train, plain.train), (data.val, plain.val)):
        with_rows = with_token.windows(starts, 16)
        rows = without.windows(starts, 16)
        assert (with_rows[:, 0] == BOS).all()
        assert (with_rows[:, 1:] == rows[:, 1:]).all()
        assert len(with_token) == len(without)
    assert data.source.endswith("a.txt; <s> at the start of each window")
    assert plain.source.endswith("a.txt")
    assert (data.tokenizer.bos_ids, plain.tokenizer.bos_ids) == ((BOS,), ())


@pytest.mark.parametrize("documents", ["mask", "pack"])
@pytest.mark.parametrize("end", ["</s>", "<s>"])
def test_windows_of_a_text_have_the_token_for_each_rule_of_documents(documents: Any, end: str, tmp_path: Path) -> None:
    """A run on documents may be evaluated on a text, a single document; the token may also be the end-of-text token."""
    (tmp_path / "a.txt").write_text(TEXT)
    tokenizer = byte_tokenizer(START, end)
    config = text_config(tmp_path / "a.txt", tmp_path, train_fraction=1.0)
    flow = open_data(config, tokenizer).val
    split = open_data(replace(config, data=replace(config.data, documents=documents)), tokenizer).val
    starts = np.asarray(flow.eval_starts(16, 16))
    of_documents = split.windows(np.asarray(split.eval_starts(16, 16))[: len(starts)], 16)
    rows = flow.windows(starts, 16)
    expected = np.stack([rows[:, :-1], rows[:, 1:], np.zeros_like(rows[:, 1:])], axis=-1)
    assert (rows[:, 0] == BOS).all()
    assert (of_documents == expected).all()


def test_text_of_a_given_tokenizer_follows_the_setting_and_the_difference_is_printed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    tokenizer = byte_tokenizer(START)
    config = text_config(tmp_path / "a.txt", tmp_path, bos="no")
    data = open_data(config, tokenizer)
    assert data.tokenizer is tokenizer
    assert data.train.windows(np.array([3]), 16)[0, 0] != BOS
    assert data.source.endswith("; no <s> at the start of each window, unlike prompts")


def test_nothing_changes_for_gpt2(tmp_path: Path) -> None:
    """The beginning-of-text token of GPT-2 is its end-of-text token, which the tokenizer does not prepend."""
    (tmp_path / "a.txt").write_text(TEXT)
    tokenizer = byte_tokenizer(processors.ByteLevel(trim_offsets=False), end="<s>")
    data = open_data(text_config(tmp_path / "a.txt", tmp_path), tokenizer)
    assert data.source == str(tmp_path / "a.txt")
    assert data.train.windows(np.array([0]), 16)[0].tolist() == tokenizer.encode(TEXT)[:17].tolist()


@pytest.mark.parametrize("rule", ["auto", "no"])
def test_pairs_and_prompts_follow_the_same_rule(rule: str) -> None:
    tokenizer = with_bos(byte_tokenizer(START), rule)
    [(ids, _)] = encode_conversation(Pair("a", "b"), tokenizer, None)
    start = encode_prompt(tokenizer, 259, "a")
    assert ids[: len(start)].tolist() == start
    assert (BOS in start) == (rule == "auto")


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ({"path": "a.txt"}, "no"),
        ({"path": "tokens"}, "no"),
        ({"mix": ["a=1", "b=2"]}, "no"),
        ({"dataset": "shakespeare"}, "no"),
        ({"path": "talk.jsonl"}, "auto"),  # pairs began with the token
        ({"dataset": "none"}, "auto"),  # an imported model
    ],
)
def test_settings_of_0_1_0_mean_the_ids_that_it_trained_on(data: dict[str, Any], rule: str) -> None:
    values = json.loads(to_json(Config()))
    values["data"] |= data
    assert from_json(json.dumps(values)).data.bos == "auto"
    del values["data"]["bos"]
    assert from_json(json.dumps(values)).data.bos == rule
    assert from_json(json.dumps({"data": {"path": "a.txt"}})).data.bos == "auto"  # written by a person


def of_0_1_0(index: dict[str, Any]) -> dict[str, Any]:
    """The index of jaxgpt 0.1.0."""
    del index["settings"]["bos_ids"], index["tokenizer"]["bos"]
    return index


def test_a_directory_of_0_1_0_is_read_and_continued_as_it_was_written(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    out = tmp_path / "out"
    source.write_text("".join(json.dumps({"text": f"document {i} of some length"}) + "\n" for i in range(50)))
    folder = saved(byte_tokenizer(START), tmp_path / "tokenizer")
    params = PrepareParams(str(folder), val_fraction=0.0, workers=1, bos="no")
    index = prepare([str(source)], out, params)
    save_tokenizer(out, byte_tokenizer(START))  # 0.1.0 kept the tokenizer's rule
    index["tokenizer"]["sha256"] = sha256_file(out / "tokenizer.json")
    write_index(out, of_0_1_0(index))

    data = open_data(text_config(out, folder))
    assert data.source.endswith("; no <s> before each document, unlike prompts")
    with pytest.raises(
        UserError, match=r"created with the ids \[\] before each document, not \[257\]: use a different --bos"
    ):
        prepare([str(source)], out, replace(params, bos="auto"))
    again = prepare([str(source)], out, params)
    assert again["splits"] == index["splits"]


def test_an_interrupted_command_continues_with_the_same_bytes(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    out = tmp_path / "out"
    source.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50)))
    folder = saved(byte_tokenizer(START), tmp_path / "tokenizer")
    params = PrepareParams(str(folder), val_fraction=0.0, workers=1)
    prepare([str(source)], out, params)
    [shard] = out.glob("train*.bin")
    whole = shard.read_bytes()
    index = read_index(out)
    assert index is not None
    size = 1024 + 2 * len([END, BOS, *"document 0"])
    shard.write_bytes(whole[:size])
    entry = {"documents": 1, "tokens": (size - 1024) // 2, "bytes": len("document 0"), "shards": []}
    write_index(out, index | {"complete": False, "pieces": 1, "splits": index["splits"] | {"train": entry}})
    prepare([str(source)], out, params)
    assert shard.read_bytes() == whole


def test_a_trained_bpe_has_no_beginning_of_text_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(UserError, match="--bos yes: a trained bpe has no beginning-of-text token"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", PrepareParams("bpe", bos="yes"))
    assert not (tmp_path / "out").exists()


def test_the_sample_at_the_end_of_training_begins_as_the_command_that_is_printed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    tokenizer = byte_tokenizer(START)
    config = text_config(tmp_path / "a.txt", tmp_path)
    config = replace(config, train=replace(config.train, prompt="the"))
    prompt = final_prompt(config, tokenizer, open_data(config, tokenizer).val)
    assert prompt.ids == encode_prompt(tokenizer, tokenizer.vocab_size, "the") == [BOS, *tokenizer.encode("the")]
    assert tokenizer.decode(without_bos(tokenizer, prompt.ids)) == prompt.text == "the"


def prepared(tmp_path: Path, bos: Any = "auto") -> tuple[Path, Path, list[str]]:
    """Documents with `<s>` before and `</s>` after each, the directory of their tokenizer, and their texts."""
    texts = [f"document {n} has a line\nand the end of it" for n in range(40)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    folder = saved(byte_tokenizer(START), tmp_path / "tokenizer")
    prepare([str(source)], tmp_path / "out", PrepareParams(str(folder), bos=bos, val_fraction=0.0, workers=1))
    return tmp_path / "out", folder, texts


def test_the_added_tokens_of_prepared_documents_have_no_bytes(tmp_path: Path) -> None:
    out, folder, texts = prepared(tmp_path)
    data = open_data(text_config(out, folder, train_fraction=1.0))
    size = len("".join(texts))
    assert data.decode(data.val, 0, len(data.val)) == "".join(texts)
    assert bytes_per_token(data) == pytest.approx(size / (size + 2 * len(texts)))


def test_the_recorded_token_has_no_bytes_for_a_tokenizer_that_does_not_know_it(tmp_path: Path) -> None:
    out, folder, texts = prepared(tmp_path)
    tokenizer = with_bos(byte_tokenizer(START), "no")
    tokenizer.special = SpecialTokens({"eos_token_id": END})
    data = open_data(text_config(out, folder, train_fraction=1.0), tokenizer)
    assert data.decode(data.val, 0, len(data.val)) == "".join(texts)


def test_an_end_that_is_ordinary_text_counts_its_bytes(tmp_path: Path) -> None:
    """Some models also end a text at a line break, which is a character of documents."""
    out, folder, texts = prepared(tmp_path)
    tokenizer = byte_tokenizer(START)
    [newline] = tokenizer.encode("\n").tolist()
    tokenizer.special = SpecialTokens({"bos_token_id": BOS, "eos_token_id": [END, newline]})
    data = open_data(text_config(out, folder, train_fraction=1.0), tokenizer)
    assert data.decode(data.val, 0, len(data.val)) == "".join(texts)


def test_the_bytes_of_a_text_include_an_end_that_is_written_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a line\n" * 40)
    tokenizer = byte_tokenizer(START)
    [newline] = tokenizer.encode("\n").tolist()
    tokenizer.special = SpecialTokens({"eos_token_id": newline})
    data = open_data(text_config(tmp_path / "a.txt", tmp_path, train_fraction=1.0), tokenizer)
    assert bytes_per_token(data) == 1.0


def test_the_space_before_each_document_has_no_bytes() -> None:
    """Llama 2's tokenizer prepends a space to every text, which decoding removes."""
    words = ["<s>", "</s>", "\u2581a", "\u2581b"]
    library = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    library.decoder = decoders.Metaspace()
    library.add_special_tokens([AddedToken(name, normalized=False) for name in words[:2]])
    tokenizer = SubwordTokenizer(library)
    tokenizer.special = SpecialTokens({"bos_token_id": 0, "eos_token_id": 1})
    ids = np.array([1, 0, 2, 3, 1, 0, 3, 2])
    assert decode_texts(tokenizer, ids) == "a bb a"


def test_the_default_prompt_has_the_beginning_of_text_token_once(tmp_path: Path) -> None:
    out, folder, _ = prepared(tmp_path)
    config = text_config(out, folder)
    data = open_data(config)
    data_of_one_line = Tokens([np.array([END, BOS, *data.tokenizer.encode("one line only")])])
    prompt = final_prompt(config, data.tokenizer, data_of_one_line, data.bos_ids)
    assert prompt.ids == [BOS, *data.tokenizer.encode("one line only")]
