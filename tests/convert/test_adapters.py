"""Adapters in PEFT's format: export, import, and rejected adapters; tests/parity compares with PEFT itself."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import jax
import numpy as np
import pytest
from folders import LLAMA, SMALL, run_folder
from helpers import jaxgpt
from safetensors.numpy import load_file, save_file

import jaxgpt as api
from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.checkpoint.saver import save_params
from jaxgpt.config import Config, DataConfig, LoraConfig, ModelConfig
from jaxgpt.convert.peft.adapters import export_adapter
from jaxgpt.convert.peft.lora_targets import resolve_targets
from jaxgpt.convert.peft.read_adapter import read_adapter
from jaxgpt.convert.peft.tokenizer import adapter_tokenizer
from jaxgpt.convert.peft.write_adapter import write_adapter
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.errors import UserError
from jaxgpt.lm.model import load_adapters
from jaxgpt.model.lora import abstract_trained, merge
from jaxgpt.model.params import abstract_params


def lora_run(path: Path, base: Path, lora: LoraConfig) -> dict[str, Any]:
    """Write a run with random adapters on a base run, and return both."""
    opened = Run(base)
    config = Config(preset="test", init_from=f"{base}/checkpoints/0", model=opened.config().model, lora=lora)
    path.mkdir()
    write_settings(Run(path), config, opened.tokenizer())
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(abstract_trained(config.model, lora))
    adapters = tree.unflatten([rng.normal(0, 0.3, leaf.shape).astype(np.float32) for leaf in leaves])
    save_params(path / "checkpoints", adapters, {})
    return adapters  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two bases, a run with adapters of each, and the adapters of one as PEFT files."""
    folder = tmp_path_factory.mktemp("peft")
    run_folder(folder / "gpt2", SMALL)
    run_folder(folder / "llama", LLAMA)
    lora_run(folder / "separate", folder / "gpt2", LoraConfig(rank=2, alpha=8.0, targets="q_proj,v_proj,o_proj"))
    lora_run(folder / "linear", folder / "llama", LoraConfig(rank=2, alpha=3.0, targets="q_proj,down_proj"))
    done = jaxgpt("export", str(folder / "linear"), str(folder / "adapter"), "--adapter", "--base", "someone/tiny")
    assert done.code == 0
    return folder


def test_an_imported_adapter_has_the_format_of_conversations_of_its_base(written: Path, tmp_path: Path) -> None:
    copytree(written / "llama", tmp_path / "base")
    base = Run(tmp_path / "base")
    config = base.config()
    data = replace(config.data, chat_template_kwargs='{"think": false}', answer_tokens=("<think>",))
    write_settings(base, replace(config, data=data), base.tokenizer())
    assert jaxgpt("import", str(written / "adapter"), "again", "--init-from", str(base.path)).code == 0
    found = Run(Path("again")).config().data
    assert (found.template_variables, found.answer_tokens) == ({"think": False}, ("<think>",))


@pytest.mark.ci
def test_separate_adapters_share_a_fused_matrix(written: Path) -> None:
    """PEFT treats GPT-2's c_attn as one matrix: the adapters of q and v become one adapter with the sum of their ranks."""
    result = jaxgpt("export", str(written / "separate"), "out", "--adapter")
    assert result.code == 0, result.err
    config = json.loads(Path("out/adapter_config.json").read_text())
    tensors = load_file("out/adapter_model.safetensors")
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (4, 16.0, True)
    assert config["target_modules"] == [
        f"transformer.h.{i}.attn.{name}" for i in (0, 1) for name in ("c_attn", "c_proj")
    ]
    b = tensors["base_model.model.transformer.h.1.attn.c_attn.lora_B.weight"]
    assert np.any(b[:8, :2])
    assert not any(map(np.any, (b[:8, 2:], b[8:16], b[16:, :2])))
    assert jaxgpt("import", "out", "again", "--init-from", str(written / "gpt2")).code == 0
    params, expected = (api.load(run).params for run in ("again", written / "separate"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)
    lora, _ = read_adapter(Path("out"), SMALL)
    assert lora == LoraConfig(rank=4, alpha=16.0, targets="q_proj+k_proj+v_proj,o_proj")


def test_alpha_of_a_fused_matrix_is_exact(written: Path) -> None:
    """The scale alpha / r stays the same without dividing: `16 / 49 * 98` is 31.999999999999996."""
    adapters = lora_run(Path("run"), written / "gpt2", LoraConfig(rank=49, alpha=16.0, targets="q_proj,v_proj"))
    write_adapter(Path(), Run(Path("run")).config(), adapters, "base")
    values = json.loads(Path("adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"]) == (98, 32.0)


def test_adapters_are_read_as_they_were_written(written: Path) -> None:
    lora, adapters = read_adapter(written / "adapter", LLAMA)
    assert lora == LoraConfig(rank=2, alpha=3.0, targets="q_proj,down_proj")
    jax.tree.map(np.testing.assert_array_equal, adapters, load_adapters(written / "linear", "best").params)
    config = json.loads((written / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/tiny"


def test_the_merged_model_is_an_ordinary_one(written: Path) -> None:
    assert jaxgpt("export", str(written / "linear"), "merged").code == 0
    assert jaxgpt("import", "merged", "ordinary").code == 0
    config, params, adapters = load_adapters(written / "linear", "best")
    jax.tree.map(np.testing.assert_array_equal, api.load("ordinary").params, merge(params, adapters, config.lora.alpha))


def test_an_adapter_has_a_card(written: Path) -> None:
    card = (written / "adapter/README.md").read_text()
    assert "base_model: someone/tiny\n" in card
    assert "LoRA adapters of rank 2" in card
    assert "AutoPeftModelForCausalLM" in card
    assert str(written) not in card
    result = jaxgpt("export", str(written / "linear"), "out", "--adapter", "--dtype", "bfloat16")
    assert (result.code, "adapters are written in float32: omit --dtype bfloat16" in result.err) == (2, True)


def copy(written: Path, changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Copy the adapter directory with a different config, and return its tensors."""
    folder = Path("adapter")
    folder.mkdir()
    config = json.loads((written / "adapter/adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    tensors = load_file(written / "adapter/adapter_model.safetensors")
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def test_rslora_is_a_scale(written: Path) -> None:
    off = {"modules_to_save": None, "rank_pattern": {}, "use_dora": False, "megatron_core": "megatron.core"}
    copy(written, {"use_rslora": True, "lora_dropout": 0.1, "target_modules": "all-linear"} | off)
    lora, _ = read_adapter(Path("adapter"), LLAMA)
    assert lora.alpha / lora.rank == pytest.approx(3 / math.sqrt(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_dora": True, "r": 2},
            "unknown option use_dora (True): merge the adapter with PEFT (merge_and_unload), and import the merged model\n",
        ),
        ({"bias": "all"}, "bias 'all' is not supported, only 'none'"),
        ({"modules_to_save": ["lm_head"]}, "unknown option modules_to_save (['lm_head'])"),
        ({"rank_pattern": {"q_proj": 4}}, "unknown option rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported: it changes"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"r": 0}, "r 0 is not supported: it must be at least 1"),
        ({"r": 3}, "has shape (2, 8), expected (3, 8)"),
        ({"lora_alpha": 0}, "lora_alpha 0.0 is not supported: it must be above 0"),
    ],
)
def test_unsupported_features_are_refused(written: Path, changes: dict[str, Any], message: str) -> None:
    copy(written, changes)
    result = jaxgpt("import", "adapter", "run", "--init-from", str(written / "llama"))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err
    assert "--accept-option" not in result.err  # option that does not apply to adapters
    assert sorted(path.name for path in Path().iterdir()) == ["adapter"]


def test_a_missing_base_is_named(written: Path) -> None:
    result = jaxgpt("import", str(written / "adapter"), "run", "--init-from", "nowhere")
    assert (result.code, result.err.split(":")[1]) == (2, " no run at nowhere")
    copytree(written / "llama", "base")
    assert jaxgpt("import", str(written / "adapter"), "run", "--init-from", "base").code == 0
    Path("base").rename("elsewhere")
    result = jaxgpt("sample", "run", "--prompt", "a")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "restore it, or move it next to run" in result.err


def test_a_rank_above_a_side_is_read(tmp_path: Path) -> None:
    """PEFT allows such ranks. Separate adapters of a fused matrix become one adapter, here of rank 24 for an 8 x 24 matrix."""
    run_folder(Path("base"), SMALL)
    adapters = lora_run(Path("run"), Path("base"), LoraConfig(rank=8, alpha=4.0, targets="q_proj,k_proj,v_proj"))
    assert jaxgpt("export", "run", "out", "--adapter").code == 0
    assert json.loads(Path("out/adapter_config.json").read_text())["r"] == 24
    assert jaxgpt("import", "out", "again", "--init-from", "base").code == 0
    expected = merge(api.load("base").params, adapters, 4.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), api.load("again").params, expected)
    assert jaxgpt("info", "again").code == 0


FIRST = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
FILE = Path("adapter/adapter_model.safetensors")


def remove_tensor(tensors: dict[str, Any]) -> None:
    save_file({name: tensor for name, tensor in tensors.items() if name != FIRST}, FILE)


def remove_layer(tensors: dict[str, Any]) -> None:
    """Remove both tensors of a matrix in one layer."""
    save_file({name: tensor for name, tensor in tensors.items() if "layers.1.self_attn.q_proj" not in name}, FILE)


def add_tensor(tensors: dict[str, Any]) -> None:
    save_file(tensors | {"base_model.model.lm_head.weight": tensors[FIRST]}, FILE)


def copy_head(tensors: dict[str, Any]) -> None:
    """Add a copy of the head, as PEFT saves it next to adapters of the head."""
    save_file(tensors | {"base_model.model.lm_head.base_layer.weight": tensors[FIRST]}, FILE)


def diverge(tensors: dict[str, Any]) -> None:
    save_file(tensors | {FIRST: tensors[FIRST] * np.nan}, FILE)


def truncate(tensors: dict[str, Any]) -> None:
    FILE.write_bytes(FILE.read_bytes()[:-5])


def make_unreadable(tensors: dict[str, Any]) -> None:
    """Put a directory in the place of a file: even root cannot read it, unlike a file without permissions."""
    FILE.unlink()
    FILE.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tensor, f"tensor {FIRST} of shape (2, 8) is missing"),
        (
            remove_layer,
            "q_proj has adapters only in some layers, not in model.layers.1.self_attn.q_proj: merge the adapter with PEFT",
        ),
        (add_tensor, "tensor base_model.model.lm_head.weight is unexpected"),
        (
            copy_head,
            "lm_head.base_layer.weight is unexpected, because it is not an adapter of a matrix of the base: merge",
        ),
        (diverge, "contains non-finite numbers"),
        (truncate, "is truncated"),
        (make_unreadable, f"cannot read {FILE}: "),
    ],
)
def test_damaged_tensors_are_refused(written: Path, damage: Any, message: str) -> None:
    damage(copy(written, {}))
    assert_refused(written / "llama", message)


def test_a_base_with_other_names_is_refused(written: Path) -> None:
    copy(written, {})
    expected = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
    assert_refused(written / "gpt2", f"expected {expected}): set --init-from to the run")


def test_a_base_without_a_family_is_refused(written: Path) -> None:
    copy(written, {})
    base = run_folder(Path("base"), replace(LLAMA, activation="relu2", mlp="plain"))
    assert_refused(
        base,
        "none of its 8 tensors adapts a matrix of the base (found base_model.model.model.layers.0.mlp.down_proj."
        "lora_A.weight, expected none, because no transformers family has its matrices): set --init-from to the run",
    )


@pytest.mark.parametrize(
    "model", [replace(LLAMA, n_experts=4), replace(LLAMA, n_experts=4, qk_norm=True)], ids=["mixtral", "qwen3_moe"]
)
def test_adapters_of_experts_are_not_exported(tmp_path: Path, model: ModelConfig) -> None:
    run_folder(tmp_path / "base", model)
    lora_run(tmp_path / "run", tmp_path / "base", LoraConfig(rank=2, targets="q_proj,down_proj"))
    done = jaxgpt("export", str(tmp_path / "run"), str(tmp_path / "out"), "--adapter")
    assert done.code == 2
    assert "adapters of experts (down_proj) are not converted to PEFT: export the merged model" in done.err
    assert not (tmp_path / "out").exists()


def test_adapters_of_attention_in_a_model_with_experts_are_read_as_they_were_written(tmp_path: Path) -> None:
    run_folder(tmp_path / "base", replace(LLAMA, n_experts=4))
    adapters = lora_run(tmp_path / "run", tmp_path / "base", LoraConfig(rank=2, targets="q_proj,router"))
    done = jaxgpt("export", str(tmp_path / "run"), str(tmp_path / "out"), "--adapter")
    assert done.code == 0, done.err
    again = read_adapter(tmp_path / "out", Run(tmp_path / "base").config().model)
    jax.tree.map(np.testing.assert_array_equal, again.adapters, adapters)


def test_adapters_of_experts_are_refused_with_the_reason(tmp_path: Path) -> None:
    """PEFT with transformers 4 writes a pair of tensors for each expert."""
    base = run_folder(tmp_path / "base", replace(LLAMA, n_experts=4))
    lora_run(tmp_path / "trained", base, LoraConfig(rank=2, targets="q_proj"))
    done = jaxgpt("export", str(tmp_path / "trained"), "adapter", "--adapter")
    assert done.code == 0, done.err
    tensors = load_file("adapter/adapter_model.safetensors")
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_{}.weight"
    pair = {name.format("A"): np.zeros((2, LLAMA.n_embd), np.float32), name.format("B"): np.zeros((7, 2), np.float32)}
    save_file(tensors | pair, "adapter/adapter_model.safetensors")
    assert_refused(
        base, f"adapters of experts, such as {name.format('A')}, are not supported: merge the adapter with PEFT"
    )


def assert_refused(base: Path, message: str) -> None:
    """Check that importing the adapter on a base prints one line, and writes no run."""
    result = jaxgpt("import", "adapter", "run", "--init-from", str(base))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.model.", "base_model.model."),  # get_peft_model of a bare model
        ("base_model.model.model.", "base_model.model.model.language_model."),  # a text model in a multimodal model
        ("base_model.model.model.", "model."),  # without PEFT's prefix
        (".weight", ".default.weight"),  # a state dict with the names of adapters
    ],
    ids=["bare", "multimodal", "no prefix", "named"],
)
def test_adapters_of_every_kind_of_model_are_read(written: Path, old: str, new: str) -> None:
    tensors = copy(written, {"task_type": "FEATURE_EXTRACTION"})
    file = "adapter/adapter_model.safetensors"
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert not renamed.keys() & tensors.keys()
    save_file(renamed, file)
    _, adapters = read_adapter(Path("adapter"), LLAMA)
    jax.tree.map(np.testing.assert_array_equal, adapters, read_adapter(written / "adapter", LLAMA)[1])


def test_an_adapter_may_be_next_to_other_weights(written: Path) -> None:
    copy(written, {})
    model = Run(written / "llama").config().model
    _, alone = read_adapter(Path("adapter"), model)
    save_file({"w": np.ones(3, np.float32)}, "adapter/model.safetensors")
    _, beside = read_adapter(Path("adapter"), model)
    jax.tree.map(np.testing.assert_array_equal, beside, alone)


def test_two_adapters_of_one_matrix_are_rejected(written: Path) -> None:
    tensors = copy(written, {})
    twice = {name.replace("model.model.", "model."): tensor for name, tensor in tensors.items()}
    save_file(tensors | twice, "adapter/adapter_model.safetensors")
    with pytest.raises(UserError, match=r"and base_model\.model\..* adapt the same matrix, layers\.0\..*: keep one"):
        read_adapter(Path("adapter"), LLAMA)


def test_adapters_of_rewritten_matrices_are_rejected(tmp_path: Path) -> None:
    """ReLU squared is exported as a gated MLP, so its matrix has no counterpart."""
    run_folder(tmp_path / "base", replace(LLAMA, mlp="plain", activation="relu2"))
    lora_run(tmp_path / "trained", tmp_path / "base", LoraConfig(rank=2, targets="up_proj"))
    with pytest.raises(UserError, match=r"the llama model, .* matrices \(gate_proj\): export the merged model"):
        export_adapter(tmp_path / "trained", tmp_path / "adapter")


TEMPLATE = "{% for m in messages %}<x>{{ m.content }}{{ eos_token }}{% endfor %}"
ADDED = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def import_with_tokenizer(written: Path, tokenizer: Any, *, rows: int = 60, **config: Any) -> tuple[Any, str]:
    """Import an adapter with a tokenizer on a base with `rows` rows; return the tokenizer of the run, and the output.

    Args:
        tokenizer: changes the content of the base's tokenizer.json; None: the adapter has no tokenizer.json.
        config: content of the adapter's tokenizer_config.json.
    """
    model = replace(LLAMA, vocab_size=rows)
    special = Run(written / "llama").tokenizer()
    assert special.vocab_size < rows - 1
    base_config = Config(preset="test", model=model, data=DataConfig(dataset="none"))
    special.special = SpecialTokens({"eos_token_id": 0}, {"chat_template": "base", "eos_token": special.decode([0])})
    base = Path("wide")
    base.mkdir()
    write_settings(Run(base), base_config, special)
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(abstract_params(model))
    params = tree.unflatten([rng.normal(0, 0.3, leaf.shape).astype(np.float32) for leaf in leaves])
    save_params(base / "checkpoints", params, {"config": asdict(base_config)})

    copy(written, {})
    if tokenizer is not None:
        value = json.loads(special.to_json())
        tokenizer(value)
        Path("adapter/tokenizer.json").write_text(json.dumps(value))
    Path("adapter/chat_template.jinja").write_text(TEMPLATE)
    Path("adapter/tokenizer_config.json").write_text(json.dumps(config))
    result = jaxgpt("import", "adapter", "run", "--init-from", str(base))
    assert result.code == 0, result.err
    return Run(Path("run")).tokenizer(), result.out


def add_token(value: dict[str, Any], content: str = "<x>") -> None:
    i = max([*value["model"]["vocab"].values(), *(token["id"] for token in value["added_tokens"])]) + 1
    value["added_tokens"].append({"id": i, "content": content, "special": True, **ADDED})


def test_the_tokenizer_of_an_adapter_is_used(written: Path) -> None:
    tokenizer, out = import_with_tokenizer(written, add_token, eos_token="<x>")
    i = Run(Path("wide")).tokenizer().vocab_size
    assert tokenizer.encode_special("<x>").tolist() == [i]
    assert tokenizer.special.names["eos_token"] == "<x>"
    assert tokenizer.special.chat_template == TEMPLATE
    assert tokenizer.special.generation == {"eos_token_id": 0}, "an adapter has no generation_config.json"
    assert "ignored" not in out


def test_the_template_of_the_base_is_kept_if_an_adapter_has_none(written: Path) -> None:
    base = Run(written / "llama").tokenizer()
    base.special = SpecialTokens({}, {"chat_template": "base"})
    copy(written, {})
    Path("adapter/tokenizer.json").write_text(base.to_json())
    tokenizer, note = adapter_tokenizer(Path("adapter"), base, 60)
    assert (tokenizer.special.chat_template, note) == ("base", "")


def test_the_template_of_an_adapter_without_a_tokenizer_is_used(written: Path) -> None:
    tokenizer, out = import_with_tokenizer(written, None)
    assert tokenizer.special.chat_template == TEMPLATE
    assert "ignored" not in out


def test_special_tokens_of_an_adapter_without_a_tokenizer_are_named(written: Path) -> None:
    tokenizer, out = import_with_tokenizer(written, None, eos_token="<x>")
    assert tokenizer.special.names["eos_token"] == Run(Path("wide")).tokenizer().special.names["eos_token"]
    assert "the adapter's special tokens are ignored, because it has no tokenizer.json" in out


def test_a_tokenizer_with_different_ids_is_ignored_with_a_note(written: Path) -> None:
    def exchange(value: dict[str, Any]) -> None:
        vocab = value["model"]["vocab"]
        first, second, *_ = vocab
        vocab[first], vocab[second] = vocab[second], vocab[first]

    tokenizer, out = import_with_tokenizer(written, exchange)
    assert tokenizer.special.chat_template == "base"
    assert "tokenizer and chat template are ignored, because its ids differ from the ids of the base's tokenizer" in out


def test_added_tokens_beyond_the_rows_of_the_base_are_named(written: Path) -> None:
    def add_many(value: dict[str, Any]) -> None:
        for n in range(60):
            add_token(value, f"<{n}>")

    tokenizer, out = import_with_tokenizer(written, add_many)
    assert tokenizer.vocab_size == 60
    assert "the adapter's added tokens with ids above 59 are ignored: the base has no rows for them" in out


def test_a_tokenizer_that_cannot_be_read_is_ignored_with_a_note(written: Path) -> None:
    tokenizer, out = import_with_tokenizer(written, lambda value: value.pop("model"))
    assert tokenizer.special.chat_template == "base"
    assert (
        "the adapter's tokenizer and chat template are ignored, because they cannot be read: adapter/tokenizer.json is not"
        in out
    )


def test_targets_have_the_names_of_either_side() -> None:
    def resolved(model: Any, targets: str) -> str:
        return resolve_targets(model, LoraConfig(rank=2, targets=targets))

    assert resolved(SMALL, "c_proj") == "o_proj,down_proj"
    assert resolved(SMALL, "attn.c_proj,mlp.c_fc") == "o_proj,up_proj"
    assert resolved(LLAMA, "all-linear") == "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    assert resolved(SMALL, "all-linear") == "q_proj+k_proj+v_proj,o_proj,up_proj,down_proj"
    with pytest.raises(UserError, match=r"mean c_attn\?\): choose from k_proj, o_proj, .*c_attn, c_proj, c_fc, or all"):
        resolved(SMALL, "c_atn")
    with pytest.raises(UserError, match="distinct names"):
        resolved(SMALL, "c_attn,q_proj")
