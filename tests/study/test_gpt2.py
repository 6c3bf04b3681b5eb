"""The questions of the study notes to GPT-2: counts and shapes at full size, and their recorded outputs with its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxgpt
from jaxgpt import study
from jaxgpt.convert.import_model import import_model

NEEDS = (
    "JAXGPT_GPT2 must name a folder with GPT-2's config.json, model.safetensors and tokenizer.json, and notes.json: "
    '{"inside": {"prompt", "layer", "head", "map", "next"}, "greedy": {"prompt", "text"}, "beams": {"prompt", "texts"}}'
)


def check_recorded(lm: jaxgpt.LM, notes: dict[str, Any]) -> None:
    """Compare a model with recorded outputs."""
    inside = notes["inside"]
    greedy = notes["greedy"]
    beams = notes["beams"]
    seen = study.capture(lm, lm.tokenizer.encode(inside["prompt"])[None])
    expected = np.asarray(inside["map"])
    T = len(expected)
    assert seen.logits.shape == (1, T, lm.config.model.vocab_size)
    found = np.asarray(seen.attentions[inside["layer"]][0, inside["head"]])
    decimals = max(len(repr(float(x)).partition(".")[2]) for x in expected.flat)
    assert np.abs(found - expected).max() <= 0.5 * 10.0**-decimals + 1e-5  # as many digits as were printed
    assert lm.tokenizer.decode([int(seen.logits[0, -1].argmax())]) == inside["next"]
    [text] = jaxgpt.generate(lm, greedy["prompt"], temperature=0, max_length=50)
    assert text.text.startswith(greedy["text"])
    best = jaxgpt.generate(lm, beams["prompt"], num_beams=5, num_return_sequences=3, early_stopping=True, max_length=60)
    assert [out.text for out in best] == beams["texts"]


def test_recorded_outputs_of_the_notes(tmp_path: Path) -> None:
    folder = Path(os.environ.get("JAXGPT_GPT2", "") or "none given")
    if not (folder / "notes.json").is_file() or not (folder / "config.json").is_file():
        pytest.skip(NEEDS)
    notes = json.loads((folder / "notes.json").read_text())
    assert (notes["inside"]["layer"], notes["inside"]["head"]) == (0, 11)
    assert np.shape(notes["inside"]["map"]) == (7, 7)
    assert notes["inside"]["next"] == " way"
    assert "the sun was shining" in notes["greedy"]["text"]
    assert len(notes["beams"]["texts"]) == 3
    import_model(folder, tmp_path / "gpt2")
    check_recorded(jaxgpt.load(tmp_path / "gpt2"), notes)


@pytest.mark.ci
def test_recorded_outputs_of_random_weights(tmp_path: Path, gpt2_tokenizer: Path) -> None:
    """The outputs are recorded here, by transformers, from a small GPT-2 with GPT-2's vocabulary."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 50_256, "eos_token_id": 50_256}
    sizes = {"n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 12, "initializer_range": 0.4}
    options = transformers.GPT2Config(**sizes, **ends, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(options).eval()
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "gpt2", tokenizer=str(gpt2_tokenizer))
    lm = jaxgpt.load(tmp_path / "gpt2")
    prompt = "The quick brown fox jumps over the"
    ids = torch.tensor(lm.tokenizer.encode(prompt)[None].tolist())
    assert ids.shape == (1, 7)
    with torch.no_grad():
        out = model(ids, output_attentions=True)
        whole = {"attention_mask": torch.ones_like(ids), "pad_token_id": 50_256, "do_sample": False}
        greedy = model.generate(ids, max_length=50, **whole)[0, 7:]
        search = {"num_beams": 5, "num_return_sequences": 3, "early_stopping": True}
        beams = model.generate(ids, max_length=60, **search, **whole)[:, 7:]

    def decode(row: Any) -> str:
        return lm.tokenizer.decode([i for i in row.tolist() if i != 50_256])

    notes = {
        "inside": {
            "prompt": prompt,
            "layer": 0,
            "head": 11,
            "map": out.attentions[0][0, 11].numpy().astype(float).round(4).tolist(),
            "next": decode(out.logits[0, -1].argmax()[None]),
        },
        "greedy": {"prompt": prompt, "text": decode(greedy)},
        "beams": {"prompt": prompt, "texts": [decode(row) for row in beams]},
    }
    check_recorded(lm, notes)
    for wrong in ({"head": 10}, {"next": " way"}):
        with pytest.raises(AssertionError):
            check_recorded(lm, notes | {"inside": notes["inside"] | wrong})
