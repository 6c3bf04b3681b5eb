"""Speed of tasks: jaxgpt against the model `hf` of lm-evaluation-harness, on the same requests.

python benchmarks/tasks.py RUN EXPORT    (a run, and `jaxgpt export RUN EXPORT`)

Both sides answer requests made from the pages of docs/, with tokenization, in turn in one process and on the same cores; the
first call of each side, which compiles, is reported separately. `hf` uses the fastest of --batch-sizes. Needs torch,
transformers, accelerate and lm_eval.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

KINDS = ("choices", "letters", "texts", "answers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run")
    parser.add_argument("export")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-sizes", default="4,16", help="batch sizes of hf to try")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM

    import jaxgpt
    from jaxgpt.tasks.harness import TaskModel
    from jaxgpt.tasks.quiet import quiet

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    transformers.logging.set_verbosity_error()
    hf = HFLM(pretrained=args.export, device="cpu", dtype="float32", batch_size=1)
    ours = TaskModel(jaxgpt.load(args.run))

    results: dict[str, Any] = {}
    for kind in args.kinds.split(","):
        requests = make_requests(kind, random.Random(args.seed))
        method = {"texts": "loglikelihood_rolling", "answers": "generate_until"}.get(kind, "loglikelihood")
        answers: dict[str, Any] = {}

        def run(side: str, method: str = method, requests: Any = requests, answers: Any = answers) -> None:
            model = ours if side == "jaxgpt" else hf
            if side != "jaxgpt":
                hf.batch_size_per_gpu = int(side.split()[1])
            with quiet():
                answers[side] = getattr(model, method)(requests, disable_tqdm=True)

        results[kind] = compare(run, args.repeats, args.batch_sizes.split(","))
        results[kind] |= difference(answers["jaxgpt"], answers[results[kind]["hf_batch"]])
        print(f"{kind}: {json.dumps(results[kind])}", flush=True)
    packages = {name: version(name) for name in ("jax", "jaxlib", "torch", "transformers", "lm_eval")}
    print(json.dumps({"python": platform.python_version(), "cores": cores, **packages, "args": vars(args), **results}))


def make_requests(kind: str, draw: random.Random) -> list[Any]:
    """Return the requests of a kind: parts of the pages, cut at random words."""
    from lm_eval.api.instance import Instance

    pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    words = " ".join(page.read_text() for page in pages).split()

    def span(least: int, most: int) -> str:
        begin = draw.randrange(len(words) - most)
        return " ".join(words[begin : begin + draw.randint(least, most)])

    arguments: list[tuple[Any, ...]] = []
    if kind == "choices":
        for _ in range(40):
            context = span(5, 50)
            arguments += [(context, " " + span(1, 15)) for _ in range(4)]
    elif kind == "letters":
        for _ in range(40):
            question = span(30, 80)
            arguments += [(f"{question}\nAnswer:", f" {letter}") for letter in "ABCD"]
    elif kind == "texts":
        arguments = [(span(450, 450)[: draw.randint(800, 3000)],) for _ in range(4)]
    else:
        settings = {"until": ["."], "max_gen_toks": 24, "do_sample": False}
        arguments = [(span(5, 60), settings) for _ in range(16)]
    name = {"texts": "loglikelihood_rolling", "answers": "generate_until"}.get(kind, "loglikelihood")
    return [Instance(name, {}, each, n) for n, each in enumerate(arguments)]


def compare(run: Callable[[str], None], repeats: int, batch_sizes: Sequence[str]) -> dict[str, Any]:
    """Time both sides in turn: medians of wall and CPU seconds, and the seconds of the first call."""
    first = timed(run, "jaxgpt")
    speeds = {}
    for size in batch_sizes:
        run(f"hf {size}")
        if len(batch_sizes) > 1:
            speeds[f"hf {size}"], _ = timed(run, f"hf {size}")
    fastest = min(speeds, key=lambda name: speeds[name], default=f"hf {batch_sizes[0]}")

    seconds: dict[str, list[Sequence[float]]] = {"jaxgpt": [], fastest: []}
    for _ in range(repeats):
        for side, values in seconds.items():
            values.append(timed(run, side))
    found: dict[str, Any] = {"hf_batch": fastest, "first_call": round(first[0], 2)}
    for side, values in seconds.items():
        name = side.split()[0]
        found[name] = round(statistics.median(wall for wall, _ in values), 3)
        found[f"{name}_cpu"] = round(statistics.median(cpu for _, cpu in values), 3)
    found["ratio"] = round(found["hf"] / found["jaxgpt"], 3)
    found["ratio_cpu"] = round(found["hf_cpu"] / found["jaxgpt_cpu"], 3)
    found["all"] = {side: [round(wall, 3) for wall, _ in values] for side, values in seconds.items()}
    return found


def timed(run: Callable[[str], None], side: str) -> tuple[float, float]:
    """Return the wall and CPU seconds of a call."""
    cpu = time.process_time()
    wall = time.perf_counter()
    run(side)
    return time.perf_counter() - wall, time.process_time() - cpu


def difference(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Return the largest difference of log probabilities in nats, and the number of different answers."""
    if isinstance(ours[0], str):
        return {"different": sum(a != b for a, b in zip(ours, theirs, strict=True))}
    if isinstance(ours[0], float):
        return {"nats": max(abs(a - b) for a, b in zip(ours, theirs, strict=True))}
    nats = max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True))
    return {"nats": nats, "different": sum(bool(a) != bool(b) for (_, a), (_, b) in zip(ours, theirs, strict=True))}


if __name__ == "__main__":
    main()
