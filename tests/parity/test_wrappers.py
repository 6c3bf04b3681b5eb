"""The text models in multimodal models compute the same logits as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import compiled
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from parity.families import GEMMA, SMALL, V, randomize  # noqa: E402

from jaxgpt.convert.export_model import export_model  # noqa: E402
from jaxgpt.convert.import_model import import_model  # noqa: E402
from jaxgpt.convert.open_model import read_model  # noqa: E402
from jaxgpt.data.tokenizers.new import make_tokenizer  # noqa: E402
from jaxgpt.lm import load  # noqa: E402
from jaxgpt.model import GPT  # noqa: E402

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PIXELS = {"image_size": 8, "patch_size": 4}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 100.0}
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": GEMMA | LINEAR | {"query_pre_attn_scalar": 24},
            "vision_config": VISION | PIXELS,
            "mm_tokens_per_image": 4,
            "image_token_index": 5,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": SMALL | {"model_type": "mistral", "head_dim": 16, "sliding_window": 7},
            "vision_config": VISION | PIXELS | {"model_type": "pixtral", "head_dim": 8},
            "image_token_index": 5,
        },
    ),
    "llava": (
        "Llava",
        {
            "text_config": SMALL | {"model_type": "llama"},
            "vision_config": VISION | PIXELS | {"model_type": "clip_vision_model"},
            "image_token_index": 5,
        },
    ),
}


def saved(kind: str, folder: Path) -> Any:
    """Write a small multimodal model with random weights, and return it."""
    name, options = WRAPPED[kind]
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(make_tokenizer("ids", "", 0, V).to_json())
    return model


def logits(params: Any, model: Any, ids: np.ndarray) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return np.asarray(compiled(GPT(model), params, ids))


@pytest.mark.parametrize(
    "kind", ["gemma3", *(pytest.param(kind, marks=pytest.mark.ci) for kind in ("mistral3", "llava"))]
)
def test_a_text_model_has_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = saved(kind, tmp_path / "hf")
    ids = np.random.default_rng(0).integers(6, V, (2, 40))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    done = import_model(tmp_path / "hf", tmp_path / "run")
    assert done.skipped > 0
    lm = load(tmp_path / "run")
    assert np.abs(logits(lm.params, lm.config.model, ids) - expected).max() < 2e-5 * max(1, expected.std())
    # The export is a text model, with the same logits.
    export_model(tmp_path / "run", tmp_path / "out")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert "text_config" not in json.loads((tmp_path / "out/config.json").read_text())
    with torch.no_grad():
        again = text(torch.tensor(ids)).logits.numpy()
    assert np.abs(again - expected).max() < 2e-5 * max(1, expected.std())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "language_model."])
def test_every_version_of_the_names_is_read(prefix: str, tmp_path: Path) -> None:
    saved("gemma3", tmp_path / "hf")
    _, expected, _ = read_model(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    renamed = {}
    for name, tensor in tensors.items():
        text = "language_model." in name
        renamed[prefix + name.split("language_model.")[1].removeprefix("model.") if text else name] = tensor
    assert len(renamed) == len(tensors)
    save_file(renamed, file)
    _, found, _ = read_model(tmp_path / "hf")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
