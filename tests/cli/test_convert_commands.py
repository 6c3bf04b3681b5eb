"""The commands import, export, finetune and info."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from folders import SMALL, TEXT, hf_folder, run_folder

from jaxgpt.checkpoint.run import Run
from jaxgpt.cli import main
from jaxgpt.trainer.metrics import read_metrics


def test_import_and_export(tmp_path, capsys):
    config = hf_folder(tmp_path / "hf") / "config.json"
    run = str(tmp_path / "run")
    out = str(tmp_path / "out")
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"alibi": True, "_comment": 1, "eos_token_id": [10, 300]})
    )
    assert main(["import", str(tmp_path / "hf"), run]) == 2
    assert "unknown option alibi (True)" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "hf"), run, "--accept-option", "alibi"]) == 0
    assert "gpt2, " in capsys.readouterr().out
    assert main(["export", run, out, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["family"] == "gpt2"
    assert figures["max_logit_change"] < 1e-5
    assert main(["import", str(tmp_path / "hf"), run]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["info", run]) == 0
    assert Run(Path(run)).tokenizer().end_ids == (10,)
    assert main(["sample", run, "--prompt", "a", "--max-new-tokens", "3"]) == 0


@pytest.mark.ci
def test_an_existing_run_is_refused_before_a_download(tmp_path, monkeypatch, capsys):
    run = run_folder(tmp_path / "run", SMALL)
    monkeypatch.setattr("jaxgpt.convert.hub_models.fetch_model", lambda *args: pytest.fail("downloaded"))
    assert main(["import", "someone/large", str(run)]) == 2
    assert capsys.readouterr().err.endswith("run already exists: choose a different name, or remove it\n")


def test_finetune_starts_from_a_run(tmp_path, capsys):
    run_folder(tmp_path / "base", SMALL)
    (tmp_path / "my.txt").write_text(TEXT * 40)
    start = ["finetune", "--init-from", "base", "--data.path", "my.txt", "--train.sample-tokens", "0"]
    optim = ["--optim.learning-rate", "1e-30", "--optim.weight-decay", "0"]
    flags = [*optim, "--train.steps", "1", "--data.window", "8", "--mesh.data", "1"]
    with jax.numpy_dtype_promotion("standard"):
        assert main(["train", *start, *flags, "--out", "tuned"]) == 0
    import jaxgpt

    old = jaxgpt.load("base")
    new = jaxgpt.load("tuned")
    np.testing.assert_array_equal(old.params["wte"]["embedding"], new.params["wte"]["embedding"])
    np.testing.assert_array_equal(old.params["wpe"]["embedding"], new.params["wpe"]["embedding"])
    assert (new.config.window, new.config.model.block_size) == (8, 16), "the context is the base's"
    [_, step, *_] = read_metrics(tmp_path / "tuned" / "metrics.jsonl")
    assert step["tokens"] == 8 * new.config.train.batch_size
    assert new.tokenizer.encode(TEXT).tolist() == old.tokenizer.encode(TEXT).tolist()
    capsys.readouterr()


def test_models_are_printed_regardless_of_their_names(capsys):
    hf_folder(Path("run"))
    for words, name in ((["import", "run", "directory"], "run"), (["export", "directory", "out"], "directory")):
        assert main(words) == 0
        assert f"  {name}, gpt2, " in capsys.readouterr().out
