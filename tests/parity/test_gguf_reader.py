"""GGUF files give the same logits in transformers, for the families that its GGUF reader supports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from folders import hf_folder  # noqa: E402
from gguf_files import MODELS, convert  # noqa: E402
from llamacpp_values import PLAIN, PROMPT  # noqa: E402

from jaxgpt.convert.families import FAMILIES  # noqa: E402
from jaxgpt.convert.open_model import read_model  # noqa: E402
from jaxgpt.model import GPT  # noqa: E402

# transformers has its defaults for settings that its reader ignores.
DEFAULTS: dict[str, dict[str, int]] = {
    "gpt2": {"block_size": 1024},
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma3_text": {"head_dim": 256},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_logits(name: str, tmp_path: Path) -> None:
    config = replace(MODELS[name], **DEFAULTS[name])
    hf_folder(tmp_path / "hf", config, family=FAMILIES[name])
    convert(tmp_path / "hf", tmp_path / "m.gguf", PLAIN)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits.numpy()
    model, params, _ = read_model(tmp_path / "m.gguf")
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(GPT(model).apply)({"params": params}, jnp.asarray([PROMPT], jnp.int32))
    assert np.std(expected) > 0.1
    assert np.abs(np.asarray(logits) - expected).max() < 2e-5
