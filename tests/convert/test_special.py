"""Special tokens of imported models: the start and end of texts, here and after export."""

import json
from dataclasses import replace

import numpy as np
import pytest
from folders import LLAMA, hf_folder, llama_tokenizer

import jaxgpt
from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.cli import main
from jaxgpt.convert.export_model import export_model
from jaxgpt.convert.import_model import import_model
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.special_files import read_special_files
from jaxgpt.errors import UserError
from jaxgpt.lm.arguments import encode_prompt, start_ids

START = 265
END = 266
V = 270
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
GENERATION = {"bos_token_id": 1, "eos_token_id": [END, 2], "pad_token_id": 0, "temperature": 0.6, "top_p": 0.9}
TOKENIZER = {
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
    "eos_token": "<|im_end|>",
    "pad_token": "<unk>",
    "unk_token": "<unk>",
    "model_max_length": 1000000000000000019884624838656,
    "tokenizer_class": "LlamaTokenizer",
    "legacy": True,  # a space also begins the text after a special token, as in tokenizer.json
}
MESSAGES = [{"role": "user", "content": "a b"}]


def source_folder(path, **files):
    """A Llama directory with special tokens; `files` maps stems to the content of a file, None to omit it."""
    hf_folder(path, replace(LLAMA, vocab_size=V))
    config = json.loads((path / "config.json").read_text()) | {"bos_token_id": 1, "eos_token_id": 2}
    contents = {
        "config": config | files.pop("config", {}),
        "tokenizer": llama_tokenizer(("<|im_start|>", "<|im_end|>")),
        "generation_config": GENERATION,
        "tokenizer_config": TOKENIZER,
    } | files
    for name, content in contents.items():
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A source directory, and the run imported from it."""
    base = tmp_path_factory.mktemp("special")
    source = source_folder(base / "hf")
    import_model(source, base / "run")
    return source, base / "run"


def test_they_are_kept_with_the_run(folders):
    tokenizer = jaxgpt.load(folders[1]).tokenizer
    assert (tokenizer.bos_ids, tokenizer.end_ids, tokenizer.eos_id) == ((1,), (END, 2), END)
    assert tokenizer.special.chat_template == TEMPLATE
    assert tokenizer.special.names["bos_token"] == "<s>"
    assert tokenizer.special.generation == GENERATION


def test_a_later_run_takes_them_over(folders, tmp_path):
    """As with `--init-from`, `data.tokenizer` is the path of the tokenizer; the directory had metadata of a different run."""
    run = folders[1]
    again = make_tokenizer(str(run / "tokenizer.json"), "", 0, 0)
    (tmp_path / "chat_template.jinja").write_text("a different template")
    config = Run(run).config()
    write_settings(Run(tmp_path), config, again)
    assert load_tokenizer(tmp_path).special == again.special
    write_settings(Run(tmp_path), config, make_tokenizer("byte", "", 0, 0))
    assert load_tokenizer(tmp_path).special == SpecialTokens()


@pytest.mark.ci
def test_every_way_of_generating_ends_there(folders):
    lm = jaxgpt.load(folders[1])
    free = load_tokenizer(folders[1])
    prompt = [1, 5, 9]
    greedy = {"max_new_tokens": 6, "temperature": 0.0}
    free._usual_end = lambda: ()  # a tokenizer without an end token
    free.special = SpecialTokens()
    plain = jaxgpt.generate(lm._replace(tokenizer=free), prompt, **greedy)[0].ids
    end = plain[-1]
    assert end != plain[0]
    ending = load_tokenizer(folders[1])
    ending.special = SpecialTokens({"eos_token_id": [START, end]})
    ours = lm._replace(tokenizer=ending)
    out = jaxgpt.generate(ours, prompt, **greedy)[0]
    assert (out.ids, out.finish_reason) == (plain[: plain.index(end)], "stop")
    assert [p.done for p in jaxgpt.stream(ours, prompt, **greedy) if p.done] == [out]
    beams = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 6}
    told = jaxgpt.generate(lm._replace(tokenizer=free), prompt, stop_ids=[START, end], **beams)
    assert jaxgpt.generate(ours, prompt, **beams) == told


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {"eos_token_id": [2, START]}, (2, START)),
        (None, {"eos_token_id": END}, (END,)),
        ({"eos_token_id": 2}, {"eos_token_id": END}, (2,)),
        ({"temperature": 1.0}, {"eos_token_id": END}, (END,)),
        ({}, {"eos_token_id": None}, ()),
        (None, {"eos_token_id": [-1, 2, 2]}, (2,)),
    ],
)
def test_generation_config_comes_before_config(tmp_path, generation, config, expected):
    folder = source_folder(tmp_path / "hf", generation_config=generation, config=config)
    values = json.loads((folder / "config.json").read_text())
    assert read_special_files(folder, values).special.end_ids == expected


def test_the_first_token_is_added_where_the_tokenizer_says_so_and_never_twice(folders):
    tokenizer = load_tokenizer(folders[1])
    text = tokenizer.encode("a b").tolist()

    def ids(prompt, special=False):
        return encode_prompt(tokenizer, V, prompt, special)

    assert 1 not in text
    assert ids("a b") == [1, *text]
    assert ids("<s>a b", special=True) == [1, *text]
    assert ids([5, 6]) == [5, 6]
    assert (encode_prompt(tokenizer, V, ""), start_ids(tokenizer)) == ([], [1])
    named = ids("<|im_start|>a<|im_end|>", special=True)
    assert (named[:2], named[-1]) == ([1, START], END)
    assert START not in ids("<|im_start|>a")


@pytest.mark.parametrize("has_own", [True, False])
def test_a_chosen_tokenizer_keeps_the_template_of_the_model(has_own, tmp_path):
    """Files next to the chosen tokenizer have precedence; the ids that end a text are always the model's."""
    source = source_folder(tmp_path / "hf")
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (source / "tokenizer.json").rename(chosen / "tokenizer.json")
    if has_own:
        own = {"chat_template": "own", "unk_token": "<s>"}
        (chosen / "tokenizer_config.json").write_text(json.dumps(own))
        (chosen / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    import_model(source, tmp_path / "run", tokenizer=str(chosen / "tokenizer.json"))
    special = jaxgpt.load(tmp_path / "run").tokenizer.special
    assert special.chat_template == ("own" if has_own else TEMPLATE)
    assert special.names["unk_token"] == ("<s>" if has_own else "<unk>")
    assert special.names["eos_token"] == "<|im_end|>"
    assert special.generation == GENERATION


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("said", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_prompts_are_encoded_as_transformers_does(tmp_path, said, added):
    transformers = pytest.importorskip("transformers")
    tokenizer = llama_tokenizer(("<|im_start|>", "<|im_end|>"))
    if not added:
        tokenizer["post_processor"] = None
    config = TOKENIZER | said | {"tokenizer_class": "PreTrainedTokenizerFast"}
    folder = source_folder(tmp_path / "hf", tokenizer=tokenizer, tokenizer_config=config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text in ("a b", " ab\n\u00e9\U0001f600", "b"):
        assert encode_prompt(ours, V, text) == theirs(text).input_ids
    assert start_ids(ours) == [1]  # as in transformers' `generate`
    text = "<|im_start|>user\na b<|im_end|>\n"
    assert ours.encode_special(text).tolist() == theirs(text, add_special_tokens=False).input_ids


def test_export_writes_back_what_was_read(folders, tmp_path):
    source, run = folders
    export_model(run, tmp_path / "out")
    config, generation, tokens = (
        json.loads((tmp_path / "out" / f"{name}.json").read_text())
        for name in ("config", "generation_config", "tokenizer_config")
    )
    assert generation == GENERATION
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, [END, 2], 0]
    assert [tokens[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")] == ["<s>", "<|im_end|>", "<unk>", "<unk>"]
    transformers = pytest.importorskip("transformers")
    one, two = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    chat = {"tokenize": False, "add_generation_prompt": True}
    assert one.apply_chat_template(MESSAGES, **chat) == two.apply_chat_template(MESSAGES, **chat)
    assert (two.bos_token_id, two.eos_token_id, two.pad_token_id) == (1, END, 0)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [END, 2]


def test_tokens_of_the_map_are_the_same_in_transformers_after_export(tmp_path):
    """Test names, tokens without names and named templates, in files as transformers 4 wrote them."""
    transformers = pytest.importorskip("transformers")
    names = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, "sep_token": "</s>"}
    source = source_folder(
        tmp_path / "hf",
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "image_token": "<|im_start|>"},
        special_tokens_map=names | {"additional_special_tokens": ["<|im_start|>"]},
    )
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ sep_token }}")
    import_model(source, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out")
    one, two = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    assert two.special_tokens_map == one.special_tokens_map
    assert two.extra_special_tokens == one.extra_special_tokens == ["<|im_start|>"]
    assert two.chat_template == one.chat_template
    text = "<s>a b<|im_start|>c</s><|im_end|>"
    assert two(text).input_ids == one(text).input_ids
    assert jaxgpt.load(tmp_path / "run").tokenizer.special.names == one.special_tokens_map


@pytest.mark.parametrize(("rule", "start"), [("auto", True), ("no", False)])
def test_the_loss_of_a_text_is_that_of_windows_that_begin_with_the_token(folders, tmp_path, capsys, rule, start):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    source, run = folders
    (tmp_path / "a.txt").write_text("ab a b ba ab\n" * 20)
    assert main(["eval", str(run), "--data.path", str(tmp_path / "a.txt"), "--data.bos", rule, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = load_tokenizer(source).encode((tmp_path / "a.txt").read_text())
    T = LLAMA.block_size
    losses = []
    for k in range(0, len(ids) - T, T):
        inputs = ids[k : k + T].tolist()
        targets = ids[k + 1 : k + T + 1].tolist()
        if start:
            inputs[0] = 1
        with torch.no_grad():
            logits = model(torch.tensor([inputs])).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(targets)).item())
    assert result["windows"] == len(losses)
    assert result["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert f"; {'' if start else 'no '}<s> at the start of each window" in result["text"]


@pytest.mark.ci
@pytest.mark.parametrize(("rule", "prompt"), [("auto", [1]), ("no", [])])
def test_a_fine_tuned_run_keeps_the_rule_for_its_prompts(folders, tmp_path, rule, prompt):
    (tmp_path / "a.txt").write_text("ab a b ba ab\n" * 20)
    words = [
        "train",
        "finetune",
        "--init-from",
        str(folders[1]),
        "--data.path",
        str(tmp_path / "a.txt"),
        "--data.bos",
        rule,
    ]
    size = ["--train.steps", "1", "--train.batch-size", "1", "--data.window", "8", "--train.sample-tokens", "0"]
    assert main([*words, *size, "--out", str(tmp_path / "run")]) == 0
    tokenizer = jaxgpt.load(tmp_path / "run").tokenizer
    assert encode_prompt(tokenizer, V, "a b") == [*prompt, *tokenizer.encode("a b")]
    export_model(tmp_path / "run", tmp_path / "out")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("a b").input_ids == encode_prompt(tokenizer, V, "a b")


def test_the_end_of_the_turn_is_exported_first(tmp_path):
    """A fine-tuned model generates the end of the turn, and transformers stops there, too."""
    files = {"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": 2}}
    import_model(source_folder(tmp_path / "hf", **files), tmp_path / "run")
    lm = jaxgpt.load(tmp_path / "run")
    [out] = jaxgpt.generate(lm, [[START, 5]], max_new_tokens=3, temperature=0)
    # Exchange the rows of the tied head, so that the model generates the end of the turn.
    rows = lm.params["wte"]["embedding"]
    order = list(range(V))
    order[END], order[out.ids[0]] = out.ids[0], END
    assert out.ids[0] not in (START, 5)
    jaxgpt.save(lm._replace(params=lm.params | {"wte": {"embedding": rows[np.array(order)]}}), tmp_path / "tuned")
    export_model(tmp_path / "tuned", tmp_path / "out")
    for name in ("config", "generation_config"):
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text())["eos_token_id"] == [END, 2]

    [ended] = jaxgpt.generate(jaxgpt.load(tmp_path / "tuned"), [[START, 5]], max_new_tokens=3, temperature=0)
    assert (ended.ids, ended.finish_reason) == ([], "stop")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = theirs.generate(torch.tensor([[START, 5]]), max_new_tokens=3, do_sample=False)
    assert ids.tolist() == [[START, 5, END]]


BAD = {
    "an id": ({"generation_config": {"eos_token_id": "2"}}, "eos_token_id must be an integer or a list"),
    "a list of ids": ({"generation_config": {"eos_token_id": [2, 0.5]}}, "eos_token_id must be an integer or a list"),
    "a boolean": (
        {"config": {"eos_token_id": True}, "generation_config": None},
        "config.json: eos_token_id must be an integer",
    ),
    "a token": ({"tokenizer_config": {"bos_token": ["<s>"]}}, "bos_token must be a string"),
    "no object": ({"tokenizer_config": []}, "expected an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path, case):
    files, message = BAD[case]
    source = source_folder(tmp_path / "hf", **files)
    with pytest.raises(UserError, match=message) as e:
        import_model(source, tmp_path / "run")
    assert "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("template", [[{"name": "default", "template": 1}], 3])
def test_a_bad_template_is_refused(tmp_path, template):
    source = source_folder(tmp_path / "hf", tokenizer_config={"chat_template": template})
    (source / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="chat_template must be a string"):
        read_special_files(source)
    (source / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_special_files(source)


@pytest.mark.ci
def test_commands(folders, capsys):
    """A decoder that strips a text's first space gets prompt and new ids together; --special turns names into ids."""
    run = str(folders[1])
    assert main(["explain", run, "--prompt", "a", "--show", str(V), "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    assert {c["id"]: c["text"] for c in candidates}[263] == " a"
    chat = ["--prompt", "<|im_start|>a<|im_end|>", "--max-new-tokens", "2", "--temperature", "0", "--json"]
    assert main(["sample", run, *chat, "--special"]) == 0
    lm = jaxgpt.load(run)
    named = encode_prompt(lm.tokenizer, V, chat[1], special=True)
    expected = jaxgpt.generate(lm, named, max_new_tokens=2, temperature=0)[0]
    assert json.loads(capsys.readouterr().out)["samples"][0]["ids"] == expected.ids
    assert expected != jaxgpt.generate(lm, chat[1], max_new_tokens=2, temperature=0)[0]
