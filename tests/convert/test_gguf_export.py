"""Exports to GGUF files equal the files of llama.cpp's converter, or name the setting that llama.cpp lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import llama_tokenizer
from gguf_files import GEMMA, LLAMA, MODELS, SPM, TEXTS, UNTIED, V, convert
from helpers import TEXT, make
from llamacpp_values import source

import jaxgpt
from jaxgpt.cli import main
from jaxgpt.config import Config, ModelConfig
from jaxgpt.convert import probes
from jaxgpt.convert.families import express_in_family
from jaxgpt.convert.gguf import compare as gguf_compare
from jaxgpt.convert.gguf import describe as gguf_describe
from jaxgpt.convert.gguf import export as gguf_export
from jaxgpt.convert.gguf.compare import space_scheme, spaces_note
from jaxgpt.convert.gguf.describe import describe_tokenizer
from jaxgpt.convert.gguf.export import export_gguf
from jaxgpt.convert.gguf.model import GgufWeights
from jaxgpt.convert.gguf.tokenizer import read_tokenizer
from jaxgpt.convert.gguf.writer import TYPES
from jaxgpt.convert.import_model import import_model
from jaxgpt.convert.llamacpp import config as llamacpp
from jaxgpt.convert.llamacpp.architectures import ARCHITECTURES, architecture_of
from jaxgpt.convert.open_model import read_model
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import with_bos
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, save

gguf = pytest.importorskip("gguf")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the comparison of logits, which compiles two models; one test makes it."""
    monkeypatch.setattr(gguf_export, "probe_logits", lambda config, params: np.zeros(3))
    monkeypatch.setattr(probes, "probe_logits", lambda config, params: np.zeros(3))


def run_of(folder: Path, model: ModelConfig, tokenizer: Tokenizer | None = None) -> Path:
    tokenizer = tokenizer or make_tokenizer("byte")
    save(LM(Config(model=model), make(model)[1], tokenizer), folder / "run")
    return folder / "run"


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", MODELS)
def test_an_export_equals_the_converted_original(name: str, tmp_path: Path) -> None:
    """The tensors are equal bit for bit, and the metadata have equal values."""
    convert(source(name, tmp_path), tmp_path / "converted.gguf")
    import_model(tmp_path / "converted.gguf", tmp_path / "run")
    export_gguf(tmp_path / "run", tmp_path / "m.gguf")
    theirs = GgufWeights(tmp_path / "converted.gguf")
    ours = GgufWeights(tmp_path / "m.gguf")
    for tensor in theirs.quantized:
        np.testing.assert_array_equal(ours.read(tensor), theirs.read(tensor), tensor)
    assert ours.quantized.keys() == theirs.quantized.keys()
    for key, value in theirs.metadata.items():
        if not key.startswith(("GGUF.", "tokenizer.ggml.token")):
            assert ours.metadata[key] == value, key
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["gpt_neox", "olmo2"])
def test_a_tied_head_is_written_where_llama_cpp_needs_one(name: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, replace(MODELS[name], tie_embeddings=True))
    export_gguf(run, tmp_path / "m.gguf")
    weights = GgufWeights(tmp_path / "m.gguf")
    np.testing.assert_array_equal(weights.read("output.weight"), weights.read("token_embd.weight"))


def test_the_command_compares_the_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, LLAMA)
    assert main(["export", str(run), str(tmp_path / "m.gguf")]) == 0
    out = capsys.readouterr().out
    assert "supported by                              llama.cpp, according to runs of small models" in out
    assert "largest logit difference after reloading  0.0e+00" in out
    assert main(["export", str(run), str(tmp_path / "m.gguf")]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_different_model_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is absent after a failed comparison."""
    run = run_of(tmp_path, LLAMA)
    params = make(LLAMA, seed=1)[1]
    monkeypatch.setattr(probes, "read_model", lambda path: read_model(path)._replace(config=LLAMA, params=params))
    with pytest.raises(RuntimeError, match="the export failed: its logits differ from the model"):
        export_gguf(run, tmp_path / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", TYPES)
def test_types_of_matrices(kind: str, tmp_path: Path) -> None:
    """Matrices have the requested type, vectors are float32, and values match the gguf package."""
    run = run_of(tmp_path, replace(LLAMA, n_inner=64))
    export_gguf(run, tmp_path / "m.gguf", kind)
    weights = GgufWeights(tmp_path / "m.gguf")
    expected = gguf.GGMLQuantizationType[kind.upper()]
    params = jaxgpt.load(run).params
    down = np.ascontiguousarray(np.asarray(params["h_0"]["mlp"]["down_proj"]["kernel"]).T)
    rounded = gguf.quants.dequantize(gguf.quants.quantize(down, expected), expected)
    assert weights.quantized["blk.0.ffn_down.weight"].tensor_type == expected
    np.testing.assert_array_equal(weights.read("blk.0.ffn_down.weight"), rounded)
    assert weights.quantized["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


ROPE_3 = {"rope_factor": 8.0, "rope_original_context": 24}
# Model, and the metadata of its windows.
WINDOWS = {
    "default": (GEMMA, {}),
    "default of few layers": (replace(GEMMA, n_layer=4, window_pattern="L"), {}),
    "all layers": (replace(GEMMA, window_pattern="L"), {"attention.sliding_window_pattern": 0}),
    "every second": (replace(GEMMA, window_pattern="LG"), {"attention.sliding_window_pattern": 2}),
    "base": (replace(GEMMA, rope_local_theta=5e4), {"rope.freq_base_swa": 5e4}),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_of_gemma(case: str) -> None:
    model, expected = WINDOWS[case]
    gemma = ARCHITECTURES["gemma3"]
    metadata = llamacpp.config_to_metadata(gemma, llamacpp.express(gemma, express_in_family(model)[1]))
    found = {key: value for key, value in metadata.items() if "pattern" in key or "swa" in key}
    base = {"rope.freq_base_swa": 1e4}
    assert found == {f"gemma3.{key}": value for key, value in (base | expected).items()}


# Model, and a part of the error.
REJECTED = {
    "activation": (replace(LLAMA, activation="gelu"), "model.activation 'gelu' has no llama.cpp llama equivalent"),
    "window": (replace(UNTIED, sliding_window=6), "model.sliding_window 6 has no llama.cpp llama equivalent"),
    "scaling": (replace(MODELS["qwen3"], **ROPE_3), "model.rope_factor 8.0 has no llama.cpp qwen3 equivalent"),
    "yarn": (
        replace(LLAMA, rope_factor=8.0, rope_scaling="yarn"),
        "model.rope_factor 8.0 has no llama.cpp llama equivalent",
    ),
    "factors": (replace(LLAMA, **ROPE_3, rope_low_freq_factor=2.0), "model.rope_low_freq_factor 2.0 has no llama.cpp"),
    "pattern": (replace(GEMMA, window_pattern="GL"), "model.window_pattern 'GL' has no llama.cpp gemma3 equivalent"),
    "head width": (replace(MODELS["qwen2"], head_dim=16), "model.head_dim 16 has no llama.cpp qwen2 equivalent"),
    "scores": (
        replace(MODELS["gpt2"], scale_attn_weights=False),
        "model.scale_attn_weights False has no llama.cpp gpt2",
    ),
    "shares of Qwen3-MoE": (
        replace(MODELS["qwen3_moe"], router_normalize=False),
        "model.router_normalize False has no llama.cpp qwen3moe equivalent: it must be True",
    ),
    "shares of OLMoE": (
        replace(MODELS["olmoe"], router_normalize=True),
        "model.router_normalize True has no llama.cpp olmoe equivalent: it must be False",
    ),
    "grouped": (replace(MODELS["olmoe"], n_kv_head=2), "model.n_kv_head 2 has no llama.cpp olmoe equivalent"),
    "relu": (replace(MODELS["gpt2"], activation="relu"), "model.activation 'relu' has no llama.cpp gpt2 equivalent"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_settings_without_an_equivalent_are_named(case: str) -> None:
    model, message = REJECTED[case]
    family, expressed = express_in_family(model)
    with pytest.raises(UserError, match=message) as e:
        llamacpp.express(architecture_of(family.name), expressed)
    assert "\n" not in str(e.value)


def test_a_window_as_long_as_the_context_has_no_effect() -> None:
    llama = ARCHITECTURES["llama"]
    model = replace(UNTIED, sliding_window=UNTIED.block_size)
    assert llamacpp.express(llama, express_in_family(model)[1]).sliding_window == 0


def changed_bpe(folder: Path, change: Any) -> Tokenizer:
    """Return a trained BPE after a change of its tokenizer.json."""
    value = json.loads(make_tokenizer("bpe", TEXT, 300).to_json())
    change(value)
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_tokenizers_of_jaxgpt_are_restored(kind: str) -> None:
    tokenizer = make_tokenizer(kind, TEXT + "".join(TEXTS), 300)
    again = read_tokenizer(describe_tokenizer(tokenizer, 600).metadata, "m.gguf")
    assert type(again) is type(tokenizer)
    for text in TEXTS:
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert again.end_ids == tokenizer.end_ids
    assert again.bos_ids == tokenizer.bos_ids
    assert again.vocab_size == tokenizer.vocab_size


def test_characters_and_bytes_have_no_special_ids() -> None:
    """llama.cpp's other tokenizers have default ids, which would end a text at a letter."""
    for kind in ("char", "byte"):
        metadata = describe_tokenizer(make_tokenizer(kind, TEXT), 300).metadata
        assert metadata["tokenizer.ggml.model"] == "rwkv"
        assert not [key for key in metadata if key.endswith("_token_id")]


@pytest.mark.parametrize("names", [(), ("<end_of_turn>",)])
def test_sentencepiece_is_restored(names: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(llama_tokenizer(names)))
    tokenizer = load_tokenizer(tmp_path)
    again = read_tokenizer(describe_tokenizer(tokenizer, V).metadata, "m.gguf")
    for text in TEXTS:
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist(), text
    assert again.bos_ids == tokenizer.bos_ids


def test_an_imported_tokenizer_is_restored() -> None:
    metadata = SPM | {"tokenizer.chat_template": "{{ messages }}"}
    first = read_tokenizer(metadata, "m.gguf")
    again = read_tokenizer(describe_tokenizer(first, V).metadata, "m.gguf")
    assert again.special == first.special
    assert [again.encode(text).tolist() for text in TEXTS] == [first.encode(text).tolist() for text in TEXTS]


def test_templates_with_names_are_restored() -> None:
    named = {"tokenizer.chat_template.tool_use": "{{ tools }}", "tokenizer.chat_templates": ["tool_use"]}
    metadata = SPM | {"tokenizer.chat_template": "{{ messages }}"} | named
    tokenizer = read_tokenizer(metadata, "m.gguf")
    assert tokenizer.special.templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    written = describe_tokenizer(tokenizer, V).metadata
    assert {name: written[name] for name in named} == named


def chat_tokenizer(template: str, **names: str | None) -> Tokenizer:
    """Return a tokenizer of SentencePiece with a chat template; its texts end with `</s>`."""
    tokenizer = read_tokenizer(SPM, "m.gguf")
    tokenizer.special = SpecialTokens({"bos_token_id": 1, "eos_token_id": 2}, {"chat_template": template} | names)
    return tokenizer


@pytest.mark.usefixtures("uncompiled")
def test_the_end_of_the_turn_is_the_eos_of_a_file(tmp_path: Path) -> None:
    template = "{% for m in messages %}<tag>{{ m.content }}<end_of_turn>{% endfor %}"
    run = run_of(tmp_path, UNTIED, chat_tokenizer(template, eos_token="</s>"))
    export_gguf(run, tmp_path / "m.gguf")
    metadata = GgufWeights(tmp_path / "m.gguf").metadata
    ids = [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot")]
    assert [metadata["tokenizer.ggml.tokens"][i] for i in ids] == ["<end_of_turn>", "</s>"]


# Chat template, and names of tokens in tokenizer_config.json.
TEMPLATES: dict[str, tuple[str, dict[str, str | None]]] = {
    "all known": ("{{ bos_token }}{{ x }}{{ eos_token }}", {"bos_token": "<s>", "eos_token": "</s>"}),
    "a different end": ("{{ eos_token }}{{ x }}", {"eos_token": "<end_of_turn>"}),
    "null": ("{{ bos_token }}{{ x }}", {"bos_token": None}),
    "undeclared": ("{% if bos_token %}{{ bos_token }}{% endif %}{{ x }}", {}),
    "a third name": ("{{ x }}{{ pad_token }}", {"pad_token": "<tag>"}),
    "first line": ("\n  {% if true %}{{ x }}{% endif %}{{ unk_token }}", {"unk_token": "\u00e9"}),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_renders_the_same_text_with_the_variables_of_llama_cpp(case: str) -> None:
    template, names = TEMPLATES[case]
    template = template.replace("{{ x }}", "{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = chat_tokenizer(template, **names)
    metadata = describe_tokenizer(tokenizer, V).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    variables = {f"{name}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")}
    messages = [{"role": "user", "content": "ab"}]
    expected = ChatTemplate(template, tokenizer.special.variables).render(messages)
    assert ChatTemplate(metadata["tokenizer.chat_template"], variables).render(messages) == expected


def test_a_known_template_is_unchanged() -> None:
    template = "{{ bos_token }}{{ eos_token }}"
    metadata = describe_tokenizer(chat_tokenizer(template, bos_token="<s>", eos_token="</s>"), V).metadata
    assert metadata["tokenizer.chat_template"] == template


@pytest.mark.parametrize("rule", ["yes", "no"])
def test_the_rule_of_the_beginning_of_text_token_is_written(rule: str) -> None:
    tokenizer = with_bos(chat_tokenizer(""), rule)
    metadata = describe_tokenizer(tokenizer, V).metadata
    assert metadata["tokenizer.ggml.add_bos_token"] == (rule == "yes")
    again = read_tokenizer(metadata, "m.gguf")
    assert again.bos_ids == tokenizer.bos_ids
    assert with_bos(again, "no").bos_ids == ()
    assert with_bos(again, "yes").bos_ids == (1,)


def test_tokenizers_without_an_equivalent_are_named(tmp_path: Path) -> None:
    for kind in ("word", "ids"):
        with pytest.raises(UserError, match=r"train with data\.tokenizer bpe, char or byte"):
            describe_tokenizer(make_tokenizer(kind, "a b", 0, 9), 9)

    def split_at_a(value: dict[str, Any]) -> None:
        value["pre_tokenizer"]["use_regex"] = False

    with pytest.raises(
        UserError, match=r"knows no llama\.cpp pre-tokenizer that splits words as in this tokenizer\.json"
    ):
        describe_tokenizer(changed_bpe(tmp_path, split_at_a), 300)


def sentencepiece(folder: Path, **changes: Any) -> Tokenizer:
    """Return a tokenizer as in Llama 2 after changes of its tokenizer.json."""
    (folder / "tokenizer.json").write_text(json.dumps(llama_tokenizer(("<x>",)) | changes))
    return load_tokenizer(folder)


def metaspace(scheme: str) -> dict[str, Any]:
    kind = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": kind}


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_spaces_that_llama_cpp_adds_to_other_texts_are_named(scheme: str, tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, **metaspace(scheme))
    again = read_tokenizer(describe_tokenizer(tokenizer, V).metadata, "m.gguf")
    note = spaces_note(space_scheme(tokenizer))
    for text, named in ((" a", "begin with a space"), ("a <x>b", "after a special token")):
        differ = again.encode_special(text).tolist() != tokenizer.encode_special(text).tolist()
        assert differ == (named in note), text
    for text in ("a", "a  b", "\n a"):
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_metaspace_without_a_space_before_a_text_is_restored(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, **metaspace("never"))
    metadata = describe_tokenizer(tokenizer, V).metadata
    again = read_tokenizer(metadata, "m.gguf")
    assert not metadata["tokenizer.ggml.add_space_prefix"]
    for text in (" a", "a <x> b<x>b  <x>", *TEXTS):
        assert again.encode_special(text).tolist() == tokenizer.encode_special(text).tolist()


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@pytest.mark.parametrize("flag", FLAGS)
def test_added_tokens_without_an_equivalent_are_named(flag: str, tmp_path: Path) -> None:
    value = llama_tokenizer(("<x>",))
    value["added_tokens"][-1] |= {flag: True, "special": False}
    message = rf"llama\.cpp cannot match the added token '<x>' \({flag}\) as tokenizer\.json does"
    with pytest.raises(UserError, match=message):
        describe_tokenizer(sentencepiece(tmp_path, added_tokens=value["added_tokens"]), V)


@pytest.mark.parametrize("flag", FLAGS)
def test_special_tokens_without_an_equivalent_are_noted(flag: str, tmp_path: Path) -> None:
    """The ids of texts without control tokens are equal, so the file is written."""
    value = llama_tokenizer(("<x>",))
    value["added_tokens"][-1] |= {flag: True, "special": True}
    tokenizer = sentencepiece(tmp_path, added_tokens=value["added_tokens"])
    assert f"'<x>' ({flag})" in describe_tokenizer(tokenizer, V).note


def test_many_special_tokens_are_compared_after_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both counted functions are slow, because they serialize or build a complete tokenizer."""
    value = llama_tokenizer(("<x>",))
    last = value["added_tokens"][-1]
    value["added_tokens"] += [last | {"id": last["id"] + i, "content": f"<y{i}>"} for i in range(1, 20)]
    tokenizer = sentencepiece(tmp_path, **metaspace("first"), added_tokens=value["added_tokens"])
    calls = []

    def count(function: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            calls.append(function.__name__)
            return function(*arguments)

        return counted

    for module, name in ((gguf_describe, "read_tokenizer"), (gguf_compare, "space_scheme")):
        monkeypatch.setattr(module, name, count(getattr(module, name)))
    describe_tokenizer(tokenizer, V)
    assert sorted(calls) == ["read_tokenizer", "space_scheme"]


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_options_of_tokens_are_compared_where_spaces_differ(scheme: str, tmp_path: Path) -> None:
    value = llama_tokenizer(("<x>",))
    value["added_tokens"][-1] |= {"rstrip": True, "special": True}
    tokenizer = sentencepiece(tmp_path, **metaspace(scheme), added_tokens=value["added_tokens"])
    found = describe_tokenizer(tokenizer, V).note
    assert spaces_note(space_scheme(tokenizer)) in found
    assert "'<x>' (rstrip)" in found

    value["added_tokens"][-1]["special"] = False
    with pytest.raises(UserError, match=r"cannot match the added token '<x>' \(rstrip\)"):
        describe_tokenizer(sentencepiece(tmp_path, **metaspace(scheme), added_tokens=value["added_tokens"]), V)


@pytest.mark.usefixtures("uncompiled")
def test_nothing_is_written_without_an_equivalent_of_an_added_token(tmp_path: Path) -> None:
    value = llama_tokenizer(("<x>",))
    value["added_tokens"][-1] |= {"rstrip": True, "special": False}
    run = run_of(tmp_path, UNTIED, sentencepiece(tmp_path, added_tokens=value["added_tokens"]))
    assert main(["export", str(run), str(tmp_path / "m.gguf")]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "tokenizer.json"]


def test_an_added_token_may_match_before_or_after_a_normalizer_that_is_absent(tmp_path: Path) -> None:
    flags = dict.fromkeys(FLAGS, False)

    def add(value: dict[str, Any]) -> None:
        value["added_tokens"].append({"id": 299, "content": "<x>", **flags, "normalized": True, "special": True})

    tokenizer = changed_bpe(tmp_path, add)
    again = read_tokenizer(describe_tokenizer(tokenizer, V).metadata, "m.gguf")
    for text in (" a <x> b<x>", *TEXTS):
        assert again.encode_special(text).tolist() == tokenizer.encode_special(text).tolist()


@pytest.mark.parametrize("is_added", [True, False])
def test_the_unknown_token_is_found_in_a_text_if_it_is_an_added_token(is_added: bool, tmp_path: Path) -> None:
    added = llama_tokenizer(("<x>",))["added_tokens"]
    if is_added:
        added.insert(0, added[0] | {"id": 0, "content": "<unk>"})
    tokenizer = sentencepiece(tmp_path, added_tokens=added)
    again = read_tokenizer(describe_tokenizer(tokenizer, V).metadata, "m.gguf")
    for text in ("<unk>", "a <unk>b", "\u6f22"):
        assert again.encode_special(text).tolist() == tokenizer.encode_special(text).tolist()
    assert again.special.names["unk_token"] == "<unk>"


def test_two_tokens_before_a_text_are_named(tmp_path: Path) -> None:
    value = llama_tokenizer(("<x>",))["post_processor"]
    value["single"].insert(1, {"SpecialToken": {"id": "<x>", "type_id": 0}})
    value["special_tokens"]["<x>"] = {"id": "<x>", "ids": [265], "tokens": ["<x>"]}
    with pytest.raises(UserError, match=r"llama\.cpp begins a text with at most one token, but .* <s><x>"):
        describe_tokenizer(sentencepiece(tmp_path, post_processor=value), V)


@pytest.mark.usefixtures("uncompiled")
def test_the_name_of_a_run_does_not_change_special_tokens(tmp_path: Path) -> None:
    """In models named phi-3 or phi3, llama.cpp removes spaces after special tokens."""
    run = run_of(tmp_path, LLAMA).rename(tmp_path / "My-Phi-3-mini")
    export_gguf(run, tmp_path / "m.gguf")
    assert GgufWeights(tmp_path / "m.gguf").metadata["general.name"] == "My-Phi 3-mini"


def test_wrong_types_are_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, LLAMA)
    with pytest.raises(
        UserError, match=r"cannot write type q4_k: use one of f32, .*; for other types, run llama-quantize"
    ):
        export_gguf(run, tmp_path / "m.gguf", "q4_k")
    with pytest.raises(UserError, match=r"cannot write blk.0.ffn_down.weight of shape \(32, 40\) as q8_0: .* use f16"):
        export_gguf(run, tmp_path / "m.gguf", "Q8_0")  # as llama.cpp writes it
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_tensor_beyond_the_range_of_a_type_is_named(kind: str, tmp_path: Path) -> None:
    model = replace(LLAMA, n_inner=64)
    params = make(model)[1]
    kernel = params["h_0"]["mlp"]["up_proj"]["kernel"]
    params["h_0"]["mlp"]["up_proj"]["kernel"] = kernel.at[0, 0].set(1e8)
    save(LM(Config(model=model), params, make_tokenizer("byte")), tmp_path / "run")
    with pytest.raises(UserError, match=rf"blk\.0\.ffn_up\.weight has .* range of {kind}: 1e\+08; .* --type bf16"):
        export_gguf(tmp_path / "run", tmp_path / "m.gguf", kind)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.usefixtures("uncompiled")
def test_the_name_of_a_file_may_be_in_upper_case(tmp_path: Path) -> None:
    run = run_of(tmp_path, LLAMA)
    main(["export", str(run), str(tmp_path / "M.GGUF"), "--type", "f16"])
    assert (tmp_path / "M.GGUF").is_file()
    import_model(tmp_path / "M.GGUF", tmp_path / "again")
