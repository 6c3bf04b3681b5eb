"""Exported directories load in transformers strictly, with the same logits and text."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from folders import LLAMA, SMALL, TEXT, hf_folder, llama_tokenizer, run_folder
from helpers import compiled
from helpers import jaxgpt as command
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import jaxgpt
import jaxgpt.convert.export_model as export_module
from jaxgpt.checkpoint.info import Info
from jaxgpt.config import Config, DataConfig, PostConfig
from jaxgpt.convert.card import card
from jaxgpt.convert.card import license as card_license
from jaxgpt.convert.card import original as original_card
from jaxgpt.convert.card import results as card_results
from jaxgpt.convert.card import settings as card_settings
from jaxgpt.convert.engines import engines
from jaxgpt.convert.export_model import export_model
from jaxgpt.convert.families import express_in_family
from jaxgpt.convert.import_model import import_model
from jaxgpt.convert.llamacpp.tokenizers import is_recognized
from jaxgpt.convert.write_files import Tensor, write_safetensors
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError
from jaxgpt.presets import preset
from jaxgpt.trainer.metrics import read_metrics

NEOX = replace(SMALL, positions="rope", rope_fraction=0.5, parallel_residual=True)
GEMMA = replace(
    LLAMA, norm_position="both", qk_norm=True, embed_scale=True, activation="gelu_new", head_dim=6, sliding_window=3
)
MODELS = {
    "gpt2": SMALL,
    "nanogpt": replace(SMALL, bias=False, activation="gelu"),
    "bare norms": replace(SMALL, bias=False, norm_affine=False, activation="relu2", tie_embeddings=False),
    "by layer": replace(SMALL, scale_attn_by_inverse_layer_idx=True, n_inner=20),
    "llama": LLAMA,
    "llama, biases": replace(LLAMA, bias=True, n_kv_head=0, tie_embeddings=False, norm_affine=False),
    "llama3": replace(LLAMA, rope_factor=4.0, rope_original_context=8, rope_theta=100.0),
    "yarn": replace(
        LLAMA,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_beta_fast=4.0,
        rope_original_context=8,
        rope_attention_factor=0.9,
    ),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=6),
    "window": replace(LLAMA, qk_norm=True, sliding_window=3),
    "qwen2, biases added": replace(LLAMA, sliding_window=3, window_pattern="GL"),
    "gpt_neox, bare norms": replace(NEOX, bias=False, norm_affine=False, activation="relu2", tie_embeddings=False),
    "gemma, bare norms": replace(GEMMA, norm_affine=False, logit_softcap=2.0),
    "gemma, no windows": replace(GEMMA, sliding_window=0, activation="silu", tie_embeddings=False),
    "python-char": preset("python-char").with_model(n_embd=16, n_layer=2).model,
    "relu2": replace(LLAMA, mlp="plain", activation="relu2"),
}
REFUSED = {
    "head_bias": (replace(SMALL, tie_embeddings=False, head_bias=True), "head_bias"),
    "post": (replace(SMALL, norm_position="post"), "norm_position 'post'"),
    "sinusoids": (replace(SMALL, positions="sinusoidal"), "positions 'sinusoidal'"),
    "softcap": (replace(LLAMA, logit_softcap=5.0), "logit_softcap"),
    "window": (replace(SMALL, sliding_window=5), "sliding_window 5 has no gpt2 equivalent"),
    "window of GPT-NeoX": (replace(NEOX, sliding_window=5), "sliding_window 5 has no gpt_neox equivalent"),
    "fraction": (replace(LLAMA, rope_fraction=0.5), "rope_fraction 0.5 has no llama equivalent"),
    "bases": (replace(LLAMA, sliding_window=5, rope_local_theta=9.0), "rope_local_theta 9.0 has no mistral equivalent"),
    "biases": (replace(LLAMA, qkv_bias=True, qk_norm=True), "qkv_bias True has no qwen3 equivalent"),
    "scale": (replace(LLAMA, embed_scale=True), "embed_scale True has no llama equivalent"),
    "scale of GPT-2": (replace(SMALL, embed_scale=True), "embed_scale True has no gpt2 equivalent"),
    "heads": (replace(GEMMA, qk_norm_per_head=False), "qk_norm_per_head False has no gemma3_text equivalent"),
    "one norm": (replace(LLAMA, norm_position="output"), "qk_norm False has no olmo2 equivalent"),
    "wide heads": (replace(NEOX, head_dim=8), "head_dim 8 has no gpt_neox equivalent"),
    "plain": (replace(LLAMA, mlp="plain"), "mlp 'plain'"),
    "no projection": (replace(SMALL, attn_proj=False), "attn_proj"),
    "groups": (replace(SMALL, n_kv_head=1), "n_kv_head 1 has no gpt2 equivalent"),
}


def forward(lm, ids):
    return np.asarray(compiled(jaxgpt.GPT(lm.config.model), lm.params, jnp.asarray(ids, jnp.int32)))


# tests/parity/test_families.py exports each family as well.
LONG = ("by layer", "llama3", "window", "qwen2, biases added", "gemma, no windows")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in MODELS])
def test_transformers_reads_it(tmp_path, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run = run_folder(tmp_path / "run", MODELS[name])
    assert export_model(run, tmp_path / "hf").max_logit_change < 1e-5
    lm = jaxgpt.load(run)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    # For qwen2, AutoTokenizer replaces the class in tokenizer_config.json, which changes how texts are split.
    reader = transformers.PreTrainedTokenizerFast if name.startswith("qwen2") else transformers.AutoTokenizer
    words = reader.from_pretrained(tmp_path / "hf")
    assert words(TEXT).input_ids == lm.tokenizer.encode(TEXT).tolist()
    assert words.decode(words(TEXT).input_ids) == TEXT

    ids = np.array([words(TEXT).input_ids[:16]])
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(ids)).logits.numpy()
    assert np.abs(forward(lm, ids) - theirs).max() < 1e-5
    prompt = words("To be", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    mine = jaxgpt.generate(lm, ["To be"], max_new_tokens=8, temperature=0)[0]
    assert words.decode(out[0]) == "To be" + mine.text


@pytest.mark.parametrize("name", ["gpt2", pytest.param("python-char", marks=pytest.mark.long)])
def test_export_and_import_round_trip(tmp_path, name):
    run = run_folder(tmp_path / "run", MODELS[name])
    export_model(run, tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "again")
    one = jaxgpt.load(run)
    two = jaxgpt.load(tmp_path / "again")
    ids = np.arange(16)[None]
    np.testing.assert_allclose(forward(one, ids), forward(two, ids), atol=1e-6)
    assert two.tokenizer.encode(TEXT).tolist() == one.tokenizer.encode(TEXT).tolist()


@pytest.mark.parametrize(
    ("n_layer", "pattern", "window"),
    [(4, "LLLLLG", 5), (2, "G", 0), (1, "GL", 0)],
    ids=["local", "global", "one layer"],
)
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_windows_that_are_equal_need_no_pattern(config, n_layer, pattern, window):
    """Families with one window for all layers, or without windows, support these models."""
    plain = replace(config, n_layer=n_layer, sliding_window=window)
    assert express_in_family(replace(plain, sliding_window=5, window_pattern=pattern)) == express_in_family(plain)


NO_EFFECT = {
    "scaling by 1": (
        LLAMA,
        {"rope_factor": 1.0, "rope_low_freq_factor": 2.0, "rope_high_freq_factor": 3.0, "rope_original_context": 16},
    ),
    "rope of learned positions": (SMALL, {"rope_theta": 500.0, "rope_factor": 8.0, "rope_fraction": 0.5}),
    "norms of queries": (LLAMA, {"qk_norm": False, "qk_norm_per_head": False}),
    "biases of queries": (SMALL, {"bias": True, "qkv_bias": True}),
}


@pytest.mark.parametrize("case", NO_EFFECT)
def test_settings_without_effect_do_not_prevent_an_export(case):
    config, settings = NO_EFFECT[case]
    assert express_in_family(replace(config, **settings)) == express_in_family(config)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_model_whose_rope_is_scaled_by_1_is_exported_again(tmp_path, kind):
    """Some published models have this scaling, which has no effect."""
    export_model(run_folder(tmp_path / "run", LLAMA), tmp_path / "hf")
    values = json.loads((tmp_path / "hf/config.json").read_text())
    del values["rope_parameters"]
    values["rope_scaling"] = {"rope_type": kind, "factor": 1.0}
    if kind == "llama3":
        values["rope_scaling"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    (tmp_path / "hf/config.json").write_text(json.dumps(values))
    import_model(tmp_path / "hf", tmp_path / "again")
    assert export_model(tmp_path / "again", tmp_path / "exported").max_logit_change == 0


def test_the_tolerance_of_logits_is_relative(tmp_path):
    """Gemma stores each gain minus 1, which rounds; with large logits the error exceeds 1e-5."""
    lm = jaxgpt.load(run_folder(tmp_path / "run", GEMMA))
    gain = lm.params["ln_f"]["scale"] * 1000
    jaxgpt.save(lm._replace(params=lm.params | {"ln_f": {"scale": gain}}), tmp_path / "large")
    assert 1e-5 < export_model(tmp_path / "large", tmp_path / "hf").max_logit_change < 1e-2


@pytest.mark.parametrize("name", REFUSED)
def test_settings_without_an_equivalent_are_named(tmp_path, name):
    model, message = REFUSED[name]
    run = run_folder(tmp_path / "run", model)
    with pytest.raises(UserError, match=message):
        export_model(run, tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_wrong_export_fails_and_leaves_nothing(tmp_path, monkeypatch):
    """The check reads the exported files back, so it detects a faulty writer."""
    run = run_folder(tmp_path / "run", SMALL)
    right = export_module.save_weights

    def wrong(path, params, *rest):
        right(path, params | {"wpe": {"embedding": params["wpe"]["embedding"] * 1.01}}, *rest)

    monkeypatch.setattr(export_module, "save_weights", wrong)
    with pytest.raises(RuntimeError, match="differ"):
        export_model(run, tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("mount", [False, True])
def test_a_directory_that_cannot_be_replaced_is_rejected_first(tmp_path, monkeypatch, mount):
    target = tmp_path / "here"
    target.mkdir()
    if mount:
        monkeypatch.setattr(Path, "is_mount", lambda path: path == target)
    else:
        monkeypatch.chdir(target)
    with pytest.raises(UserError, match="current directory or a mount point: choose a new directory in it"):
        export_model("nowhere", target)


def test_a_directory_has_no_name_of_a_gguf_file(tmp_path):
    with pytest.raises(
        UserError, match=r"m\.gguf has the name of a GGUF file: choose a different name for a directory"
    ):
        export_model("nowhere", tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["model.safetensors", "model.BIN", "model.pt"])
def test_the_name_of_a_file_of_weights_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{name} ends in \.\w+, but an export is a directory: choose a name"):
        export_model(tmp_path / "run", tmp_path / name)
    assert not [*tmp_path.iterdir()]


def test_an_export_deletes_the_draft_of_a_killed_one(tmp_path):
    run = run_folder(tmp_path / "run", SMALL)
    killed = """import os; from pathlib import Path; from jaxgpt.convert.drafts import new_directory
with new_directory(Path("hf")) as draft:
    (draft / "old").touch()
    os._exit(9)"""
    assert subprocess.run([sys.executable, "-c", killed], cwd=tmp_path, check=False).returncode == 9
    assert {path.name for path in tmp_path.iterdir()} == {"run", ".hf.jaxgpt-tmp"}
    export_model(run, tmp_path / "hf")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hf"}
    assert not (tmp_path / "hf" / "old").exists()


def test_end_tokens_are_written(tmp_path):
    run = run_folder(tmp_path / "run", SMALL)
    tokenizer = make_tokenizer("bpe", TEXT * 5, 270, 0)
    (run / "tokenizer.json").write_text(tokenizer.to_json())
    export_model(run, tmp_path / "hf")
    files = ("config", "generation_config", "tokenizer_config")
    config, generation, tokens = (json.loads((tmp_path / "hf" / f"{name}.json").read_text()) for name in files)
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_id == 0
    assert tokens["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (preset("python-char").model, ["transformers"]),
        (preset("llama-tiny").model, ["transformers", "vLLM", "llama.cpp"]),
        (preset("gpt2").model, ["transformers", "vLLM", "llama.cpp"]),
        (replace(SMALL, tie_embeddings=False), ["transformers"]),
        (replace(SMALL, scale_attn_weights=False), ["transformers"]),
        (replace(LLAMA, sliding_window=3), ["transformers", "vLLM"]),
        (replace(LLAMA, rope_factor=8.0, rope_original_context=4), ["transformers", "vLLM", "llama.cpp"]),
        (replace(LLAMA, rope_factor=8.0, rope_original_context=8, qk_norm=True), ["transformers", "vLLM"]),
        (GEMMA, ["transformers", "vLLM", "llama.cpp"]),
    ],
)
def test_engines_that_compute_an_export_are_named(config, expected, gpt2_tokenizer):
    """llama.cpp computes SiLU in every Qwen 3, even if config.json specifies ReLU, and ignores Llama 3 scaling of RoPE."""
    family, model = express_in_family(replace(config, vocab_size=config.vocab_size or 65))
    assert list(engines(family, model, load_tokenizer(gpt2_tokenizer))) == expected


@pytest.mark.parametrize("kind", ["char", "word", "byte", "bpe"])
def test_an_own_vocabulary_excludes_llamacpp(kind):
    """llama.cpp's converter of transformers directories recognizes only published vocabularies."""
    family, model = express_in_family(preset("llama-tiny").with_model(vocab_size=300).model)
    tokenizer = make_tokenizer(kind, TEXT * 9, 300)
    assert engines(family, model, tokenizer) == ("transformers", "vLLM")


def test_a_vocabulary_as_in_llama_2_is_recognized():
    library = Tokenizer.from_str(json.dumps(llama_tokenizer(("<end>",))))
    assert is_recognized(SubwordTokenizer(library), "llama")
    assert not is_recognized(SubwordTokenizer(library), "gpt2")


def test_export_claims_no_more_than_was_run(tmp_path):
    run_folder(tmp_path / "run", LLAMA)
    out = command("export", str(tmp_path / "run"), str(tmp_path / "hf")).out
    assert "transformers; according to their source code, not run: vLLM\n" in out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", pytest.param("gemma", marks=pytest.mark.ci)])
def test_lower_precision_rounds_each_tensor_once(tmp_path, dtype, name):
    run = run_folder(tmp_path / "run", GEMMA if name == "gemma" else SMALL)
    done = export_model(run, tmp_path / "one", dtype=dtype)
    assert 0 < done.max_logit_change < 1
    config = json.loads((tmp_path / "one/config.json").read_text())
    assert config["dtype"] == dtype
    full = export_model(run, tmp_path / "full")
    assert full.max_logit_change < 1e-5
    for tensor, low in files_of(tmp_path / "one").items():
        assert str(low.dtype) == dtype
        np.testing.assert_array_equal(low, files_of(tmp_path / "full")[tensor].astype(low.dtype))
    # Importing and exporting again keeps the bits of GPT-2; Gemma's g - 1 may round again.
    import_model(tmp_path / "one", tmp_path / "again")
    export_model(tmp_path / "again", tmp_path / "two", dtype=dtype)
    if name == "gpt2":
        for tensor, low in files_of(tmp_path / "one").items():
            np.testing.assert_array_equal(low, files_of(tmp_path / "two")[tensor])


def files_of(folder):
    """Return the tensors of the safetensors files of a directory."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_a_file_of_weights_that_does_not_fit_on_the_disk_is_named():
    tensor = Tensor("a", (1,), lambda: np.ones(1, np.float32))
    with pytest.raises(OSError, match="No space left") as error:
        write_safetensors(Path("/dev/full"), [tensor])
    assert error.value.filename == "/dev/full"


def test_elements_that_bfloat16_rounds_to_infinity_are_rejected(tmp_path):
    run = run_folder(tmp_path / "run", SMALL)
    lm = jaxgpt.load(run)
    lm.params["wpe"]["embedding"] = lm.params["wpe"]["embedding"].at[0, 0].set(3.4e38)
    jaxgpt.save(lm, tmp_path / "large")
    with pytest.raises(UserError, match=r"beyond the range of bfloat16: 3.4e\+38; export with --dtype float32"):
        export_model(tmp_path / "large", tmp_path / "hf", dtype="bfloat16")


def test_no_other_type_is_suggested_for_nan(tmp_path):
    tensor = Tensor("a", (1,), lambda: np.full(1, np.nan, np.float32))
    with pytest.raises(UserError, match="tensor a has infinite or NaN elements: export an earlier checkpoint"):
        write_safetensors(tmp_path / "a", [tensor], "float16")


def test_elements_beyond_float16_are_rejected(tmp_path):
    run = run_folder(tmp_path / "run", SMALL)
    lm = jaxgpt.load(run)
    lm.params["wpe"]["embedding"] = lm.params["wpe"]["embedding"].at[0, 0].set(70_000)
    jaxgpt.save(lm, tmp_path / "large")
    with pytest.raises(
        UserError, match=r"wpe.weight has elements beyond .*float16: 7e\+04; export with --dtype bfloat16"
    ):
        export_model(tmp_path / "large", tmp_path / "hf", dtype="float16")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(UserError, match="dtype 'int4' is not supported: use one of float32, float16, bfloat16"):
        export_model(run, tmp_path / "hf", dtype="int4")


def test_a_large_model_is_several_files_with_an_index(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run = run_folder(tmp_path / "run", SMALL)
    export_model(run, tmp_path / "hf", dtype="bfloat16", shard_bytes=900)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == files_of(tmp_path / "hf").keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in files_of(tmp_path / "hf").values())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.dtype == torch.bfloat16
    import_model(tmp_path / "hf", tmp_path / "again")
    wpe = theirs.transformer.wpe.weight.detach().float().numpy()
    np.testing.assert_array_equal(jaxgpt.load(tmp_path / "again").params["wpe"]["embedding"], wpe)


def test_epsilons_are_written_in_the_shortest_form(tmp_path):
    """GGUF files store 1e-05 in float32."""
    model = replace(LLAMA, norm_eps=9.999999747378752e-06)
    export_model(run_folder(tmp_path / "run", model), tmp_path / "hf")
    assert '"rms_norm_eps": 1e-05' in (tmp_path / "hf/config.json").read_text()


CARD = "---\nlicense: apache-2.0\ntags:\n- old\n---\n# Their model\n\nThe license text.\n"


def test_a_card_keeps_the_card_and_license_of_an_imported_model(tmp_path):
    source = hf_folder(tmp_path / "source")
    (source / "README.md").write_text(CARD)
    import_model(source, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "hf")
    card = (tmp_path / "hf/README.md").read_text()
    metadata, text = card.removeprefix("---\n").split("\n---\n", 1)
    assert "license: apache-2.0" in metadata
    assert "- old" not in card
    assert "no record of their training" in text
    assert text.endswith("## Card of the original model\n\n# Their model\n\nThe license text.\n")


@pytest.mark.parametrize(
    ("metadata", "kept"),
    [
        ("---\r\nlicense: mit\r\n---\r\n", "license: mit\n"),
        ("\ufeff---\nlicense: mit\n---\n", "license: mit\n"),
        ("---\nlicense:\n- mit\n- cc-by-4.0\ntags:\n- old\n---\n", "license:\n- mit\n- cc-by-4.0\n---\n"),
        ("---\nlicense: mit\n---", "license: mit\n"),
    ],
    ids=["Windows", "byte order mark", "list", "nothing else"],
)
def test_a_license_is_kept_in_any_form(metadata, kept, tmp_path):
    (tmp_path / "README.md").write_bytes(f"{metadata}".encode())
    found = original_card.split_card(original_card.read_card(tmp_path))
    subject = card.CardSubject(run=tmp_path, info=Info(1), config=Config(), name="hf", command="")
    assert kept in card._front_matter(subject, found)
    assert "It was copied from the original model." in card_license.license_section("", found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: mit\n---\nA\n\n---\n\nB\n", ("license: mit\n", "A\n\n---\n\nB\n")),
        ("---\n# Comment\nlicense:\n- mit\n---\n\nA\n", ("# Comment\nlicense:\n- mit\n", "A\n")),
        ("---\n---\nlicense: no\n\n---\nB\n", ("", "license: no\n\n---\nB\n")),
        ("---\n\n# A\n\n---\nB\n", ("", "---\n\n# A\n\n---\nB\n")),
        ("A\n\n---\nlicense: no\n---\n", ("", "A\n\n---\nlicense: no\n---\n")),
    ],
    ids=["front matter", "comment and list", "empty", "horizontal rule first", "text first"],
)
def test_front_matter_ends_at_its_own_line(text, expected):
    assert original_card.split_card(text) == expected


def test_the_command_in_a_card_is_quoted_and_has_the_license(tmp_path):
    run = run_folder(tmp_path / "my run", SMALL)
    export_model(run, tmp_path / "out", license="mit")
    card = (tmp_path / "out/README.md").read_text()
    assert "\njaxgpt export 'my run' out --checkpoint best --dtype float32 --license mit\n" in card


def test_a_card_keeps_the_license_after_several_fine_tunings(tmp_path):
    """The license of a model also holds for the models that descend from it."""
    source = hf_folder(tmp_path / "source")
    (source / "README.md").write_text(CARD)
    import_model(source, tmp_path / "imported")
    lm = jaxgpt.load(tmp_path / "imported")
    for name, origin in (("first", "imported"), ("second", "first")):
        config = replace(lm.config, init_from=str(tmp_path / origin / "checkpoints/0"))
        jaxgpt.save(lm._replace(config=config), tmp_path / name)
    export_model(tmp_path / "second", tmp_path / "hf")
    card = (tmp_path / "hf/README.md").read_text()
    assert "license: apache-2.0" in card
    assert "# Their model" in card


def test_a_card_of_runs_that_start_from_each_other_has_no_original(tmp_path):
    lm = jaxgpt.load(run_folder(tmp_path / "first", SMALL))
    for name, origin in (("second", "third"), ("third", "second")):
        config = replace(lm.config, init_from=str(tmp_path / origin / "checkpoints/0"))
        jaxgpt.save(lm._replace(config=config), tmp_path / name)
    export_model(tmp_path / "second", tmp_path / "hf")
    assert "the run does not record a license" in (tmp_path / "hf/README.md").read_text()


def test_a_card_states_the_loss_and_tokens_of_the_exported_checkpoint():
    Path("text.txt").write_text(TEXT * 40)
    small = ["--model.n-layer", "1", "--model.n-embd", "16", "--model.n-head", "2", "--model.block-size", "8"]
    run = ["--train.steps", "6", "--train.eval-every", "2", "--train.batch-size", "4", "--train.sample-tokens", "0"]
    done = command(
        "train", "llama-tiny", "--data.path", "text.txt", *small, *run, "--train.keep-last", "3", "--out", "run"
    )
    assert done.code == 0, done.err
    assert command("export", "run", "hf", "--checkpoint", "4").code == 0
    card = Path("hf/README.md").read_text()
    [found] = [line for line in read_metrics(Path("run/metrics.jsonl")) if line["step"] == 4 and "val_loss" in line]
    assert f"| this model, step 4 | {found['val_loss']:.4f} +-" in card
    assert f"{4 * 4 * 8:,} tokens in 4 steps." in card


HELD_OUT = "The loss is on held-out text; +- is"
TRAINED = "The loss is on the training text, because the run held out no text; +- is"


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [("0.9", HELD_OUT), ("1", TRAINED)],
    ids=["a part is held out", "nothing is held out"],
)
def test_a_card_names_the_text_of_the_loss(fraction, expected):
    Path("text.txt").write_text(TEXT * 40)
    small = ["--model.n-layer", "1", "--model.n-embd", "16", "--model.n-head", "2", "--model.block-size", "8"]
    run = ["--train.steps", "2", "--train.eval-every", "2", "--train.batch-size", "4", "--train.sample-tokens", "0"]
    data = ["--data.path", "text.txt", "--data.train-fraction", fraction]
    done = command("train", "llama-tiny", *data, *small, *run, "--out", "run")
    assert done.code == 0, done.err
    assert command("export", "run", "hf").code == 0
    assert expected in Path("hf/README.md").read_text()


@pytest.mark.parametrize(("fraction", "boundary", "expected"), [(1.0, None, False), (1.0, 5, True), (0.9, None, True)])
def test_the_text_of_the_loss_of_an_earlier_checkpoint(fraction, boundary, expected):
    """Separate validation files are held out regardless of the held-out fraction."""
    info = Info(1, about={"boundaries": {"sha": boundary}})
    assert card_results._held_out(info, Config(data=DataConfig(train_fraction=fraction))) == expected


def test_a_card_omits_every_setting_with_a_path():
    """These are the settings with values that `config.json` stores as absolute paths."""
    run = "/home/me/secret/checkpoints/1"
    post = PostConfig(objective="grpo", reward=("/home/me/secret.py:f",), kl=0.1, reference=run)
    data = DataConfig(path=run, tokenizer=run, mix=())
    config = Config(init_from=run, state_from=run, data=data, post=post)
    assert "secret" not in card_settings.settings_section(config)


def test_a_card_describes_the_run_and_no_private_path(tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    (private / "text.txt").write_text(TEXT * 40)
    small = ["--model.n-layer", "1", "--model.n-embd", "16", "--model.n-head", "2", "--model.block-size", "8"]
    run = ["--train.steps", "2", "--train.eval-every", "2", "--train.batch-size", "4", "--train.sample-tokens", "0"]
    done = command("train", "llama-tiny", "--data.path", str(private / "text.txt"), *small, *run, "--out", "run")
    assert done.code == 0, done.err
    assert command("export", "run", "hf").code == 0
    card = Path("hf/README.md").read_text()
    for line in (
        "Trained on `text.txt`",
        "in 2 steps.",
        "| this model, step 2 |",
        "| uniform baseline |",
        "- `train.steps`: 2",
    ):
        assert line in card
    assert 'from_pretrained("hf")' in card
    assert "Unknown: the run does not record a license" in card
    assert "license:" not in card
    assert str(tmp_path) not in card
