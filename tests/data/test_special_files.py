"""Files of special tokens: read as transformers reads them, in any combination, and written back with the same meaning."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.tokenizers.control_tokens import ControlTokens
from jaxgpt.data.tokenizers.files import load_saved_tokenizer, load_tokenizer, save_tokenizer
from jaxgpt.data.tokenizers.special import TOKENS
from jaxgpt.data.tokenizers.special_files import read_special_files
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

NAMES = (*TOKENS, "image_token")
WORDS = ("<s>", "</s>", "<pad>", "<unk>", "<sep>", "<x>")
IN_VOCABULARY = WORDS[:4]  # the other two are only added tokens
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SHOWN = "".join(f"{{% if {name} %}}[{{{{ {name} }}}}]{{% endif %}}" for name in NAMES)
TEMPLATE = SHOWN + "{% for m in messages %}{{ m.content }} {% endfor %}"


def word_library(added: list[str]) -> Any:
    vocab = {word: i for i, word in enumerate(("a", "b", "hi", "yes", "<", ">", *IN_VOCABULARY))}
    library = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    library.add_tokens([AddedToken(word, special=True, normalized=False) for word in added])
    return library


def token(random: Random, content: str) -> Any:
    """A token as a file writes it: its text, or an object."""
    if random.random() < 0.5:
        return content
    return {"__type": "AddedToken", "content": content, "lstrip": False, "rstrip": False, "normalized": False}


def random_files(random: Random, folder: Path) -> None:
    library = word_library(random.sample(WORDS, random.randrange(len(WORDS))))
    library.save(str(folder / "tokenizer.json"))
    ids = {word: i for word, i in library.get_vocab().items() if word.startswith("<") and len(word) > 1}
    for word in WORDS:
        ids.setdefault(word, len(library.get_vocab()) + sum(other not in library.get_vocab() for other in ids))

    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name in random.sample(NAMES, random.randrange(len(NAMES))):
        config[name] = token(random, random.choice(WORDS)) if random.random() < 0.8 else None
    if random.random() < 0.5:
        key = random.choice(("additional_special_tokens", "extra_special_tokens"))
        config[key] = [token(random, word) for word in random.sample(WORDS, 2)]
    elif random.random() < 0.3:
        config["extra_special_tokens"] = {"boi_token": "<x>", "eoi": "<sep>"}
    if random.random() < 0.4:
        written = sorted(random.sample(sorted(ids), 4), key=ids.__getitem__)
        written = [word for word in written if word in library.get_vocab()] + [
            w for w in WORDS if w not in library.get_vocab()
        ]
        config["added_tokens_decoder"] = {
            str(ids[word]): {"content": word, "normalized": False, "special": random.random() < 0.7} for word in written
        }
    if random.random() < 0.7:
        config["chat_template"] = random.choice((TEMPLATE, [{"name": "default", "template": TEMPLATE + "!"}]))
    if random.random() < 0.9:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    if random.random() < 0.6:
        mapped = {name: random.choice(WORDS) for name in random.sample(NAMES, random.randrange(len(NAMES)))}
        values: dict[str, Any] = {
            name: word if random.random() < 0.5 else {"content": word, "lstrip": False, "single_word": False}
            for name, word in mapped.items()
        }
        if random.random() < 0.3:
            key = random.choice(("additional_special_tokens", "extra_special_tokens"))
            values[key] = random.sample(WORDS, 2)
        (folder / "special_tokens_map.json").write_text(json.dumps(values))
    if random.random() < 0.4:
        (folder / "added_tokens.json").write_text(json.dumps(ids))
    if random.random() < 0.5:
        (folder / "chat_template.jinja").write_text(TEMPLATE + "?")
        if random.random() < 0.5:
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")


def templates(theirs: Any) -> Any:
    """Templates by name. transformers has a dict for a list of one template, and a string for a file."""
    source = theirs.chat_template
    return {"default": source} if isinstance(source, str) else source


@pytest.mark.parametrize("seed", range(300))
def test_any_combination_of_files_is_read_and_written_as_by_transformers(seed: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = tmp_path / "source"
    target = tmp_path / "target"
    source.mkdir()
    target.mkdir()
    random_files(Random(seed), source)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(source)
    ours = load_tokenizer(source)

    # A token that only a name defines gets an id beyond the vocabulary in transformers, and is missing here.
    known = {name: word for name, word in theirs.special_tokens_map.items() if name not in ours.special.missing}
    assert ours.special.names == known
    for name in ours.special.missing:
        assert theirs.convert_tokens_to_ids(theirs.special_tokens_map[name]) >= ours.vocab_size
    text = "a <s>hi</s> b<pad> <unk> yes <sep> <x>"
    if not ours.special.missing and set(theirs.extra_special_tokens) <= ours.library.get_vocab().keys():  # type: ignore[attr-defined]
        assert ours.encode_special(text).tolist() == theirs(text, add_special_tokens=False).input_ids

    save_tokenizer(target, ours)
    written = transformers.PreTrainedTokenizerFast.from_pretrained(target)
    assert written.special_tokens_map == theirs.special_tokens_map
    assert set(written.extra_special_tokens) == set(theirs.extra_special_tokens)
    assert written(text).input_ids == theirs(text).input_ids
    assert templates(written) == templates(theirs)
    again = load_saved_tokenizer(target / "tokenizer.json")
    assert again.special == ours.special
    assert again.to_json() == ours.to_json()
    assert again.encode(text).tolist() == ours.encode(text).tolist()

    if ours.special.chat_template is None:
        return
    rendered = ChatTemplate(ours.special.chat_template, ours.special.variables).render(MESSAGES).text
    if not ours.special.missing:
        assert rendered == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)


def stored_token(form: str, content: str) -> dict[str, Any]:
    """The content of a file with a further token in one of the forms that transformers reads."""
    forms: dict[str, dict[str, Any]] = {
        "nothing": {},
        "null": {"image_token": None},
        "option": {"image_token": True},
        "string": {"image_token": content},
        "object": {"image_token": {"__type": "AddedToken", "content": content, "lstrip": False, "rstrip": False}},
        "group": {"extra_special_tokens": {"image_token": content}},
    }
    return forms[form]


@pytest.mark.parametrize("in_map", ["nothing", "null", "option", "string", "object", "group"])
@pytest.mark.parametrize("in_config", ["nothing", "null", "option", "string", "object", "group"])
def test_a_further_token_in_two_files_is_the_token_of_transformers(in_config: str, in_map: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = {"tokenizer_config": stored_token(in_config, "<s>"), "special_tokens_map": stored_token(in_map, "</s>")}
    special_folder(tmp_path, **files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).special.names == theirs.special_tokens_map


def special_folder(folder: Path, **files: Any) -> Path:
    word_library(["<s>", "</s>"]).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("in_tokenizer", [True, False])
@pytest.mark.parametrize("in_config", [True, False])
def test_the_config_decides_whether_an_added_token_is_special(
    in_tokenizer: bool, in_config: bool, tmp_path: Path
) -> None:
    """The names of special tokens in a text are text, before and after saving, here and in transformers."""
    transformers = pytest.importorskip("transformers")
    source = tmp_path / "source"
    target = tmp_path / "target"
    source.mkdir()
    target.mkdir()
    library = word_library([])
    library.add_tokens([AddedToken("<x>", special=in_tokenizer, normalized=False)])
    library.save(str(source / "tokenizer.json"))
    i = library.token_to_id("<x>")
    decoder = {str(i): {"content": "<x>", "special": in_config, "normalized": False}}
    (source / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))

    ours = load_tokenizer(source)
    assert (i in ours.encode("a <x> b").tolist()) == (not in_config)
    assert (i in ControlTokens(ours).names) == in_config
    save_tokenizer(target, ours)
    again = load_saved_tokenizer(target / "tokenizer.json")
    assert again.encode("a <x> b").tolist() == ours.encode("a <x> b").tolist()
    for folder in (source, target):
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        assert theirs.added_tokens_decoder[i].special == in_config


def test_a_template_that_prints_a_token_of_the_map_prints_it(tmp_path: Path) -> None:
    special_folder(tmp_path, special_tokens_map={"eos_token": "</s>"})
    special = load_tokenizer(tmp_path).special
    assert ChatTemplate("{{ eos_token }}", special.variables).render(MESSAGES).text == "</s>"


@pytest.mark.parametrize("template", ["{{ bos_token }}", "{{ 'a' ~ bos_token }}", "{{ 'a' + bos_token }}"])
def test_a_template_that_prints_an_unknown_token_is_an_error(template: str, tmp_path: Path) -> None:
    special = load_tokenizer(special_folder(tmp_path, tokenizer_config={"eos_token": "</s>"})).special
    with pytest.raises(UserError, match="bos_token") as caught:
        ChatTemplate(template, special.variables).render(MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token if bos_token is defined else 'none' }}",
        "{% if bos_token %}{{ bos_token }}{% else %}none{% endif %}",
        "{{ bos_token or 'none' }}",
        "{{ bos_token | default('none') }}",
        "{% if not bos_token %}none{% endif %}",
        "{% if bos_token != '<s>' %}none{% endif %}",
        "{{ messages[0].bos_token }}none",
        "{{ other }}none",
    ],
)
def test_a_template_that_tests_for_a_token_is_rendered_as_by_transformers(template: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    special_folder(tmp_path, tokenizer_config={"eos_token": "</s>"})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    special = load_tokenizer(tmp_path).special
    rendered = ChatTemplate(template, special.variables).render(MESSAGES).text
    assert rendered == "none"
    assert rendered == theirs.apply_chat_template(MESSAGES, chat_template=template, tokenize=False)


def test_a_token_declared_as_null_is_empty_text(tmp_path: Path) -> None:
    special_folder(tmp_path, tokenizer_config={"bos_token": None})
    template = "{{ bos_token }}{{ bos_token is defined }}"
    for special in (load_tokenizer(tmp_path).special, load_saved_tokenizer(tmp_path / "tokenizer.json").special):
        assert ChatTemplate(template, special.variables).render(MESSAGES).text == "False"


def test_a_name_without_an_id_is_missing_and_a_template_cannot_print_it(tmp_path: Path) -> None:
    special_folder(tmp_path, special_tokens_map={"pad_token": "[nowhere]", "eos_token": "</s>"})
    special = load_tokenizer(tmp_path).special
    assert special.names == {"eos_token": "</s>"}
    assert special.tokenizer["pad_token"] == "[nowhere]"
    with pytest.raises(UserError, match="pad_token, which is not a token of the tokenizer"):
        ChatTemplate("{{ pad_token }}", special.variables).render(MESSAGES)


WRONG = {
    "an id of added_tokens.json that is taken": (
        {"added_tokens": {"<new>": 3}},
        "'<new>' has the id 3, but would be added",
    ),
    "a string for an id": ({"added_tokens": {"<new>": "3"}}, "the id of '<new>' must be an integer"),
    "a list of added tokens": (
        {"tokenizer_config": {"added_tokens_decoder": []}},
        "added_tokens_decoder must be an object",
    ),
    "an added token without text": (
        {"tokenizer_config": {"added_tokens_decoder": {"3": {"special": True}}}},
        "added_tokens_decoder, id 3 must be a string",
    ),
    "a name of the map": (
        {"special_tokens_map": {"eos_token": 2}},
        "special_tokens_map.json: eos_token must be a string",
    ),
    "no object": ({"special_tokens_map": ["</s>"]}, "special_tokens_map.json: expected an object"),
    "a further token": ({"special_tokens_map": {"extra_special_tokens": [2]}}, "extra_special_tokens must be a string"),
    "a template without a name": (
        {"tokenizer_config": {"chat_template": [{"template": "x"}]}},
        "chat_template must be",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_one_line(case: str, tmp_path: Path) -> None:
    files, message = WRONG[case]
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(special_folder(tmp_path, **files))
    assert "\n" not in str(caught.value)


def test_an_added_token_gets_its_id(tmp_path: Path) -> None:
    size = word_library(["<s>", "</s>"]).get_vocab_size()
    special_folder(tmp_path, added_tokens={"<new>": size, "<s>": 99})
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, SubwordTokenizer)
    assert tokenizer.library.token_to_id("<new>") == size
    assert tokenizer.library.token_to_id("<s>") != 99  # as in transformers, tokenizer.json decides


def test_named_templates_are_kept_and_the_default_is_used(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    special_folder(tmp_path, tokenizer_config={"chat_template": templates})
    special = read_special_files(tmp_path).special
    assert (special.chat_template, special.tokenizer["chat_template"]) == ("d", templates)


def test_a_tokenizer_without_tokenizer_json_says_how_to_write_it(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"no tokenizer at .*tokenizer\.json: write it with transformers, AutoTokenizer"
    ):
        load_tokenizer(tmp_path)
