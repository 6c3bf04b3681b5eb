"""One of several processes that generate texts together: python texts_in_processes.py PORT INDEX COUNT DEVICES MESH.

DEVICES is the number of devices of each process, MESH the sizes of the mesh as JSON. Each process prints the results as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxgpt.config import Config, DistributedConfig, MeshConfig, ModelConfig, TrainConfig

PROMPTS = ["a", "abcabc", "ponmlk", "bb", "cde"]  # no mesh divides their number
MESSAGES = ["abc", "de"]
TEMPLATE = "{% for m in messages %}{{ m.role[0] + m.content }}\n{% endfor %}a"


def texts(mesh: dict[str, int], dtype: str = "float32") -> dict[str, Any]:
    """Return texts of each kind from a model with random weights on a mesh."""
    from jaxgpt.data.tokenizers.base import CharTokenizer
    from jaxgpt.data.tokenizers.special import SpecialTokens
    from jaxgpt.lm import LM, Chat, generate, score, stream
    from jaxgpt.trainer.build import build

    tokenizer = CharTokenizer([*"abcdefghijklmnopqrstuvwxyz\n"])
    model = ModelConfig(
        vocab_size=tokenizer.vocab_size, block_size=128, n_layer=2, n_head=4, n_embd=32, positions="rope", init_std=0.3
    )
    config = Config(model=model, train=TrainConfig(batch_size=8, compute_dtype=dtype), mesh=MeshConfig(**mesh))
    program = build(config)
    lm = LM(config, program.weights(program.init().params), tokenizer)
    found: dict[str, Any] = {}

    for name, settings in {
        "drawn": {"temperature": 0.9, "num_return_sequences": 2, "key": 3},
        "probable": {"temperature": 0, "stop": ["a"]},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
        "slid": {"overflow": "slide", "max_new_tokens": 140, "temperature": 1.0},
    }.items():
        prompts = PROMPTS[:2] if name == "slid" else PROMPTS
        found[name] = generate(lm, prompts, **{"max_new_tokens": 20} | settings)
    found["looked up"] = generate(lm, "abcabc", max_new_tokens=20, temperature=0, lookup=2)
    found["streamed"] = [piece.done for piece in stream(lm, PROMPTS, max_new_tokens=9) if piece.done]
    found["scored"] = [[each.log_p.tolist(), each.is_best.tolist()] for each in score(lm, ["a", "b"] * 5, ["cde"] * 10)]

    tokenizer.special = SpecialTokens({}, {"chat_template": TEMPLATE})
    chat = Chat(lm)
    for message in MESSAGES:
        *_, end = chat.answer(message, max_new_tokens=12)
        found[f"answer to {message}"] = end.done
    found["reused"] = chat.reused
    return found


def main() -> None:
    import jax

    _, _, _, _, devices, mesh = sys.argv
    jax.config.update("jax_num_cpu_devices", int(devices))
    print(json.dumps(texts(json.loads(mesh))))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from jaxgpt.parallel.join import joined

    settings = DistributedConfig(
        coordinator=f"127.0.0.1:{sys.argv[1]}", num_processes=int(sys.argv[3]), process_id=int(sys.argv[2])
    )
    with joined(settings):
        main()
