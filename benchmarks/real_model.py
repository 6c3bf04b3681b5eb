"""Speed of an imported chat model: decoding, prompt lookup, and time to first token in a chat.

python benchmarks/real_model.py runs/smollm2    (a model with <|im_start|> in its chat template)

The sides of a comparison alternate in one process on the same cores; results are medians. Only the chat
benchmark streams its tokens. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPEATING = """<|im_start|>user
Repeat this text:
The Seine is a river in northern France. It rises in Burgundy, flows through Paris and Rouen, and reaches the English \
Channel at Le Havre. Barges use it for most of its length, and thirty-seven bridges cross it in Paris.<|im_end|>
<|im_start|>assistant
"""
PLAIN = "The first law of thermodynamics says that"
QUESTIONS = [
    "Tell me about the history of Paris.",
    "And about its museums?",
    "Which river flows through it?",
    "How many bridges cross it?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    import jaxgpt
    from jaxgpt.config import MeshConfig
    from jaxgpt.parallel.host import use_cores

    use_cores(MeshConfig(data=1))
    lm = jaxgpt.load(args.run)
    results: dict[str, Any] = {"decode": decode(lm, args.run, args.new, args.repeats)}
    for name, prompt in (("a text to repeat", REPEATING), ("a new text", PLAIN)):
        results[f"lookup, {name}"] = lookup(lm, name, prompt, args.new, args.repeats)
    results["chat"] = chat(lm, args.repeats)
    packages = {name: version(name) for name in ("jax", "jaxlib", "torch", "transformers")}
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"python": platform.python_version(), "cores": cores, **packages, "args": vars(args), **results}))


def alternate(runs: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Time functions that return their number of generated tokens, in turn; return their median tokens/s."""
    for run in runs.values():
        run()  # compile
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            made = run()
            speeds[name].append(made / (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in speeds.items()}


def decode(lm: Any, run: str, new: int, repeats: int) -> dict[str, float]:
    import torch
    import transformers

    import jaxgpt
    from jaxgpt.convert.export_model import export_model

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        export_model(run, Path(folder) / "hf")
        hf = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=torch.float32).eval()
    ids = lm.tokenizer.encode(PLAIN)
    prompt = torch.from_numpy(ids[None].astype("int64"))
    settings = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}

    def theirs() -> int:
        return int(hf.generate(prompt, **settings).shape[1]) - len(ids)

    def ours() -> int:
        [out] = jaxgpt.generate(lm, ids.tolist(), max_new_tokens=new, temperature=0)
        return len(out.ids)

    found = alternate({"transformers": theirs, "jaxgpt": ours}, repeats)
    print(f"decoding, batch 1, float32: {found['jaxgpt']:.1f} tokens/s, "
          f"{found['jaxgpt'] / found['transformers']:.2f} x transformers ({found['transformers']:.1f})")  # fmt: skip
    return found


def lookup(lm: Any, name: str, prompt: str, new: int, repeats: int) -> dict[str, float]:
    import jaxgpt

    texts, ids = [], lm.tokenizer.encode_special(prompt).tolist()

    def run(ngram: int) -> int:
        [out] = jaxgpt.generate(lm, ids, max_new_tokens=new, temperature=0, lookup=ngram)
        texts.append(out.text)
        return len(out.ids)

    found = alternate({"plain": lambda: run(0), "lookup": lambda: run(3)}, repeats)
    assert len(set(texts)) == 1, "lookup must not change the text"
    print(f"lookup 3, {name}: {found['lookup']:.1f} tokens/s, "
          f"{found['lookup'] / found['plain']:.2f} x plain decoding ({found['plain']:.1f})")  # fmt: skip
    return found


def chat(lm: Any, repeats: int) -> dict[str, float]:
    """Time the first token of the last answer, with and without the cache of the earlier turns."""
    from jaxgpt.lm import Chat

    times: dict[str, list[float]] = {"kept": [], "read again": []}
    for _ in range(repeats + 1):
        kept = Chat(lm)
        for question in QUESTIONS[:-1]:
            for _ in kept.answer(question, max_new_tokens=100, temperature=0):
                pass
        for name, talk in (("kept", kept), ("read again", Chat(lm, kept.messages))):
            began = time.perf_counter()
            pieces = talk.answer(QUESTIONS[-1], max_new_tokens=100, temperature=0)
            next(pieces)
            times[name].append(time.perf_counter() - began)
            pieces.close()
            tokens = talk.prompt_tokens
    found = {name: statistics.median(values[1:]) for name, values in times.items()}
    print(
        f"first token of answer {len(QUESTIONS)}, after {tokens} tokens: {found['kept']:.3f} s; without the cache "
        f"of the earlier turns {found['read again']:.3f} s, {found['read again'] / found['kept']:.1f} x as long"
    )
    return found | {"prompt_tokens": tokens}


if __name__ == "__main__":
    main()
