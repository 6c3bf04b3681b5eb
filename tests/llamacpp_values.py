"""llama.cpp results: greedy ids, log probabilities and tokenizations.

`python tests/llamacpp_values.py` writes tests/convert/llamacpp.json. It needs the package xllamacpp (the extra
`llamacpp`), which contains llama.cpp and its server; llamacpp.json records its version.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from folders import hf_folder
from gguf_files import BPE, MODELS, TEXTS, TOKENIZERS, V, convert

from jaxgpt.convert.families import FAMILIES

RECORDED = Path(__file__).parent / "convert" / "llamacpp.json"
PROMPT = np.random.Generator(np.random.Philox(1)).integers(2, V, 12).tolist()
NEW = 24  # greedy ids per model
# Tokens of complete characters: llama.cpp's server returns no log probabilities for parts of characters.
PLAIN = BPE | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(V)], "tokenizer.ggml.token_type": [1] * V}


def source(name: str, folder: Path) -> Path:
    """Write the model `name` as a transformers directory."""
    return hf_folder(folder / f"{name}-hf", MODELS[name], family=FAMILIES[name.split("-")[0]])


def compute(folder: Path) -> dict[str, Any]:
    """Compute all values with llama.cpp."""
    greedy = {}
    for name in MODELS:
        path = folder / f"{name}.gguf"
        convert(source(name, folder), path, PLAIN)
        greedy[name] = _greedy(path)
    words = {}
    plain = source("llama", folder / "words")
    for name, tokenizer in TOKENIZERS.items():
        path = folder / f"words-{name}.gguf"
        convert(plain, path, tokenizer)
        words[name] = _tokenize(path)
    version = importlib.metadata.version("xllamacpp")
    return {"xllamacpp": version, "greedy": greedy, "words": words}


def _greedy(path: Path) -> dict[str, list[Any]]:
    """Return the greedy ids after `PROMPT`, and the log probability of each in nats."""
    body = {"prompt": PROMPT, "n_predict": NEW, "temperature": 0, "samplers": ["temperature"], "n_probs": 1}
    answer = _post(_server(path), "/completion", body | {"ignore_eos": True, "cache_prompt": False})
    tokens = answer["completion_probabilities"]
    return {"ids": [token["id"] for token in tokens], "log_p": [round(token["logprob"], 4) for token in tokens]}


def _tokenize(path: Path) -> list[list[int]]:
    server = _server(path)
    return [_post(server, "/tokenize", {"content": text, "parse_special": False})["tokens"] for text in TEXTS]


def _server(path: Path) -> Any:
    """Serve a file in float32, without the optimizations that round."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 64
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity = 0
    params.fit_params = False
    return xllamacpp.Server(params)


def _post(server: Any, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def main() -> None:
    """Write the values."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "words").mkdir()
        values = compute(Path(folder))
    lines = [f'"xllamacpp": {json.dumps(values["xllamacpp"])}']
    for part in ("greedy", "words"):
        rows = [f"  {json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in values[part].items()]
        lines.append(f'"{part}": {{\n' + ",\n".join(rows) + "\n}")
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
