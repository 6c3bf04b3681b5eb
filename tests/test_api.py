"""The public API, and models saved as runs."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TEXT, flags, make, repository, small
from helpers import jaxgpt as command

import jaxgpt
from jaxgpt.config import Config, DataConfig, OptimConfig
from jaxgpt.data.tokenizers.base import CharTokenizer, WordTokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.model.params import count_parameters
from jaxgpt.model.scan import stack_layers

TOKENIZER = CharTokenizer(TEXT)


@pytest.fixture(scope="module")
def lm() -> LM:
    model = small("gpt2", vocab_size=TOKENIZER.vocab_size, block_size=16)
    return LM(Config(model=model), make(model)[1], TOKENIZER)


def same(a: object, b: object) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_dir_lists_only_the_public_names() -> None:
    names = [name for name in dir(jaxgpt) if not name.startswith("_")]
    assert names == sorted(jaxgpt.__all__)
    assert len(names) <= 25
    assert not {"re", "sys", "importlib", "Path"} & set(names)
    assert {"load", "save", "generate", "train_step", "ModelConfig"} <= set(names)


@pytest.mark.ci
def test_an_editable_install_is_imported_beside_a_clone_of_the_same_name(tmp_path: Path) -> None:
    """The package must win over a directory `jaxgpt` without `__init__.py` in the current directory."""
    pytest.importorskip("setuptools", minversion="77")
    clone = tmp_path / "jaxgpt"
    site = tmp_path / "site"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository() / name, clone)
    shutil.copytree(repository() / "jaxgpt", clone / "jaxgpt", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    made = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=clone, capture_output=True, text=True)
    assert (made.returncode, "Deprecat" in made.stderr) == (0, False), made.stderr
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    find = (
        f"import importlib.util, site; site.addsitedir({str(site)!r}); print(importlib.util.find_spec('jaxgpt').origin)"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", find]  # -S: without the packages of this interpreter, such as this jaxgpt
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(clone / "jaxgpt" / "__init__.py")


@pytest.mark.parametrize("name", sorted(jaxgpt.__all__))
def test_every_public_name_is_documented(name: str) -> None:
    """A docstring names every argument, except settings of generation, which their dataclasses document."""
    public = getattr(jaxgpt, name)
    doc = inspect.getdoc(public) or ""
    assert doc.splitlines()
    if not inspect.isfunction(public):
        return
    parameters = list(inspect.signature(public).parameters.values())
    collected = {p.name for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    assert collected <= {"settings", "sampling"}
    if "the arguments of `generate`" in doc:
        doc += inspect.getdoc(jaxgpt.generate) or ""
        parameters = [p for p in parameters if f"`{p.name}`" not in doc and p.name not in collected]
    assert not collected or "`SamplingParams`" in doc
    if len(parameters) > 1:
        assert "Args:" in doc
        assert [p.name for p in parameters if f"{p.name}:" not in doc] == []


def test_repr_of_a_model_is_one_line(lm: LM) -> None:
    size = f"<LM: {count_parameters(lm.config.model):,} parameters"
    assert repr(lm) == f"{size}, made in Python>"
    jaxgpt.save(lm, "run")
    assert repr(jaxgpt.load("run", weights="int8")) == f"{size}, run, step 0>"


def test_load_returns_what_was_saved(lm: LM) -> None:
    """Test weights on devices, on the host and stacked, and the EMA of a run."""
    optim = OptimConfig(ema_decay=0.9)
    for name, params in {
        "device": lm.params,
        "host": jax.device_get(lm.params),
        "stack": stack_layers(lm.params),
    }.items():
        jaxgpt.save(LM(replace(lm.config, optim=optim), params, TOKENIZER), f"runs/{name}")
        back = jaxgpt.load(f"runs/{name}")
        assert same(back.params, lm.params)
        assert back.config.model == lm.config.model
        assert back.tokenizer.to_json() == TOKENIZER.to_json()
    assert [path.name for path in Path("runs").iterdir() if path.name.startswith(".")] == []


@pytest.mark.ci
def test_a_saved_model_is_a_run_to_every_command(lm: LM) -> None:
    jaxgpt.save(lm, "run")
    Path("text.txt").write_text(TEXT)
    few = flags(train__steps=1, train__batch_size=8, train__sample_tokens=0, mesh__data=1)
    for args in (
        ["sample", "run", "--prompt", "1", "--max-new-tokens", "3"],
        ["info", "run"],
        ["eval", "run", "--data.path", "text.txt"],
        ["export", "run", "exported"],
        ["train", "finetune", "--init-from", "run", "--data.path", "text.txt", *few],
    ):
        result = command(*args)
        assert result.code == 0, (args, result.err)
    result = command("eval", "run")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "--data.path" in result.err


@pytest.mark.long
def test_verify_accepts_a_saved_model(lm: LM) -> None:
    jaxgpt.save(lm, "run")
    assert command("verify", "run").code == 0


def test_a_config_that_names_its_data_keeps_it(lm: LM) -> None:
    data = DataConfig(path="text.txt")
    jaxgpt.save(lm._replace(config=replace(lm.config, data=data)), "run")
    assert jaxgpt.load("run").config.data == data


def without(params: Any, name: str) -> Any:
    return {key: value for key, value in params.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lm: lm._replace(params=without(lm.params, "wpe")), "weight wpe/embedding is missing"),
        (
            lambda lm: lm._replace(params=lm.params | {"wte2": jnp.ones(3)}),
            r"weight wte2 is float32 \[3\], but unknown",
        ),
        (lambda lm: lm._replace(config=lm.config.with_model(n_inner=32)), r"weight h_0/mlp/\S+ is float32 \[.*64"),
        (
            lambda lm: lm._replace(config=lm.config.with_model(n_layer=1)),
            r"weight h_1/\S+ is float32 \[\d+\], but unknown",
        ),
        (
            lambda lm: lm._replace(params=jax.tree.map(lambda w: w.astype(jnp.bfloat16), lm.params)),
            r"is bfloat16 \[.*, but float32",
        ),
        (
            lambda lm: lm._replace(params=lm.params | {"ln_f": {"scale": 1.0, "bias": 0.0}}),
            r"weight ln_f/bias is float \[\]",
        ),
        (lambda lm: lm._replace(tokenizer=WordTokenizer(str(n) for n in range(999))), "tokenizer has 999 ids"),
        (lambda lm: lm._replace(config=lm.config.with_model(vocab_size=0)), "model.vocab_size is 0"),
    ],
)
def test_weights_that_do_not_match_the_config_raise(lm: LM, change: Callable[[LM], LM], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        jaxgpt.save(change(lm), "run")
    assert "\n" not in str(error.value)
    assert list(Path().iterdir()) == []


def test_saving_is_all_or_nothing(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxgpt.save(lm, "run")
    Path("run/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="already holds a run"):
        jaxgpt.save(lm, "run")
    Path("folder").mkdir()
    jaxgpt.save(lm, "folder")  # an empty directory may be used
    Path("file").touch()
    for place in ("file", "file/below"):
        with pytest.raises(UserError, match="file"):
            jaxgpt.save(lm, place, overwrite=True)

    other = lm._replace(params=jax.tree.map(lambda w: w + 1, lm.params))
    assert same(jaxgpt.load("run").params, lm.params)
    jaxgpt.save(other, "run", overwrite=True)
    assert same(jaxgpt.load("run").params, other.params)
    assert Path("run/notes.txt").read_text() == "mine"
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder", "run"]


def test_loading_and_generating_import_no_optimizer(lm: LM) -> None:
    jaxgpt.save(lm, "run")
    code = "import sys, jaxgpt; lm = jaxgpt.load('run'); print(jaxgpt.generate(lm, ['1'], max_new_tokens=2)[0].ids); "
    subprocess.run([sys.executable, "-c", code + "assert 'optax' not in sys.modules"], check=True)


def test_batches_are_windows_as_a_function_of_seed_and_step() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    batch = jaxgpt.batches(ids, 16, 4, seed=3)
    first = batch(7)
    assert (first.shape, first.dtype) == ((4, 17), np.int32)
    assert (np.diff(first, axis=1) == 1).all()
    np.testing.assert_array_equal(jaxgpt.batches(jnp.asarray(ids), 16, 4, seed=3)(np.int64(7)), first)
    assert not np.array_equal(jaxgpt.batches(ids, 16, 4, seed=4)(7), first)
    for bad in (ids[:16], ids[None], ids.astype(float), "text"):
        with pytest.raises(UserError):
            jaxgpt.batches(bad, 16, 4)


def only_digits(logits_BV: jax.Array, text: object) -> jax.Array:
    digit_V = np.array([c.isdecimal() for c in TOKENIZER.words])
    return jnp.where(digit_V[None, :], logits_BV, -jnp.inf)


def only_numpy(logits_BV: jax.Array, text: object) -> Any:
    return np.where(np.asarray(logits_BV) > 0, logits_BV, -np.inf)


def force_digit(logits_BV: jax.Array, text: object) -> jax.Array:
    return jnp.where(jnp.arange(logits_BV.shape[-1]) == 7, jnp.inf, logits_BV)


def nan(logits_BV: jax.Array, text: object) -> jax.Array:
    return logits_BV * jnp.nan


def test_explain_gives_a_forced_token_the_probability_1(lm: LM) -> None:
    [out] = jaxgpt.generate(lm, "1", max_new_tokens=1, filters=[force_digit], temperature=0)
    choice = jaxgpt.explain(lm, "1", filters=[force_digit], temperature=0)
    assert choice.token == out.ids[0] == 7
    assert choice.probability_V[7] == 1


def test_explain_names_a_filter_that_returns_nan(lm: LM) -> None:
    with pytest.raises(UserError, match="nan returns NaN: correct the filter"):
        jaxgpt.explain(lm, "1", filters=[nan])


@pytest.mark.ci
def test_custom_filters_apply_to_sampling_beams_and_explain(lm: LM) -> None:
    """Test greedy decoding and beams with a compiled function as filter; docs/own/filter.md samples with a filter."""
    for how, allowed in (({"temperature": 0}, only_digits), ({"num_beams": 2}, jax.jit(only_digits))):
        [out] = jaxgpt.generate(lm, "1", max_new_tokens=6, filters=[allowed], **how)  # type: ignore[arg-type]
        assert out.text.isdecimal()
    assert "only_digits" in repr(jaxgpt.explain(lm, "1", filters=[only_digits]))
    for wrong in (only_digits, [3]):
        with pytest.raises(UserError, match="must be a list of hashable functions"):
            jaxgpt.generate(lm, "1", filters=wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"only_numpy converts .* to NumPy arrays: use jax.numpy"):
        jaxgpt.generate(lm, "1", filters=[only_numpy])
    with pytest.raises(UserError, match=r"returned bool \[1, \d+\] for logits of float32"):
        jaxgpt.explain(lm, "1", filters=[lambda logits, _: logits > 0])
