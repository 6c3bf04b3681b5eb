"""Tokens a second of generation, beside transformers: same random weights, same cores, one process, alternating, medians.

python benchmarks/decode.py                     GPT-2's 124M shape, batch 1 and 8, 16 + 128 tokens
python benchmarks/decode.py --layers 2 --repeats 2 --batches 1    a look whether it works
python benchmarks/decode.py --compiled          beside transformers' static cache under torch.compile, too: on a GPU

All use the GPU where there is one, and share its memory. Needs torch and transformers. The limit is what memory allows:
bytes of weights read for every token, over the read bandwidth measured in the same run, between the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

SHAPES = {"gpt2": (12, 12, 768), "gpt2-xl": (48, 25, 1600), "toy": (1, 2, 32)}  # layers, heads, width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--layers", type=int, default=0, help="0: those of the shape")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="CPU devices over which our weights are split")
    parser.add_argument("--kinds", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--compiled", action="store_true", help="also transformers with a static cache, compiled")
    parser.add_argument("--top-k", type=int, default=0, help="sample from so many tokens on both sides; 0: greedy")
    parser.add_argument("--long", type=int, default=0, help="also time a token after 16 and after so many")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU is shared

    import jaxgpt  # noqa: F401, I001  (before jax: it sets a flag)

    import jax

    jax.config.update("jax_num_cpu_devices", args.devices)
    import numpy as np
    import torch
    import transformers

    from jaxgpt.decoding import SamplingParams
    from jaxgpt.lm import model_functions
    from jaxgpt.lm.engine import DecodeSession
    from jaxgpt.ops.quantize import quantize

    torch.set_num_threads(cores)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as JAX has it
    transformers.logging.set_verbosity_error()
    layers, heads, width = SHAPES[args.shape]
    layers = args.layers or layers
    hf_config = transformers.GPT2Config(
        n_layer=layers, n_head=heads, n_embd=width, eos_token_id=None, bos_token_id=None, pad_token_id=0
    )
    torch.manual_seed(0)
    hf = transformers.GPT2LMHeadModel(hf_config).eval()
    config, params = ours(hf, layers, heads, width, args.devices)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hf = hf.to(device)
    rng = np.random.default_rng(0)
    block = rng.standard_normal(500_000_000 // 4).astype(np.float32)
    tensor = torch.from_numpy(block).to(device)

    def bandwidth() -> float:
        start = time.perf_counter()
        tensor.sum().item()
        return block.nbytes / (time.perf_counter() - start) / 1e9

    def theirs(model: Any, batch: int, compiled: bool = False) -> Callable[[], Any]:
        ids = torch.from_numpy(rng.integers(0, 50_000, (batch, args.prompt))).to(device)
        how: dict[str, Any] = {"do_sample": False, "max_new_tokens": args.new, "min_new_tokens": args.new}
        if args.top_k:
            how |= {"do_sample": True, "top_k": args.top_k}
        if compiled:
            how |= {"cache_implementation": "static", "compile_config": transformers.CompileConfig()}
        return lambda: model.generate(ids, **how).cpu()

    sampling = SamplingParams(temperature=1, top_k=args.top_k) if args.top_k else SamplingParams(temperature=0)

    def mine(kind: str, batch: int) -> Callable[[], Any]:
        low = quantize(params, kind)  # type: ignore[arg-type]
        prompts = rng.integers(0, 50_000, (batch, args.prompt)).tolist()
        keys = jax.random.split(jax.random.key(0), batch)
        model = model_functions(config, "float32")

        def run() -> Any:
            session = DecodeSession(
                low,
                prompts,
                keys,
                [args.new] * batch,
                model=model,
                sampling=sampling,
                context=config.block_size,
            )
            with placed(config, args.devices):
                return session.next_tokens(args.new)

        return run

    hf_low = None
    results: dict[str, Any] = {}
    for batch in args.batches:
        runs = {"transformers float32": theirs(hf, batch)} | {f"jaxgpt {k}": mine(k, batch) for k in args.kinds}
        if "bfloat16" in args.kinds:
            hf_low = hf_low or transformers.GPT2LMHeadModel(hf_config).to(device, torch.bfloat16).eval()
            runs["transformers bfloat16"] = theirs(hf_low, batch)
        if args.compiled:
            runs[f"transformers {'bfloat16' if hf_low else 'float32'} compiled"] = theirs(
                hf_low or hf, batch, compiled=True
            )
        first = {}
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            first[name] = time.perf_counter() - start
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        read = []
        for _ in range(args.repeats):
            for name, run in runs.items():
                read.append(bandwidth())
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        speed = {name: args.new * batch / statistics.median(times) for name, times in seconds.items()}
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - params["wpe"]["embedding"].nbytes
        limit = statistics.median(read) * 1e9 / nbytes * batch
        results[f"batch {batch}"] = {
            "tokens_per_second": speed,
            "first_call_seconds": first,
            "read_gb_per_second": statistics.median(read),
            "limit_float32": limit,
            "of_limit": speed["jaxgpt float32"] / limit if "float32" in args.kinds else None,
            "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            "over_transformers": {n: s / speed["transformers float32"] for n, s in speed.items()},
        }
        print(
            f"batch {batch}: memory read at {statistics.median(read):.1f} GB/s, limit {limit:.0f} tokens/s in float32"
        )
        for name, value in speed.items():
            ratio = value / speed["transformers float32"]
            print(f"  {name:30} {value:7.1f} tokens/s, {ratio:.2f} x transformers, {value / limit:.0%} of the limit")
    if args.long:
        session = DecodeSession(
            params, [[1] * args.prompt], jax.random.split(jax.random.key(0), 1), [args.long],
            model=model_functions(config, "float32"), sampling=sampling, context=config.block_size,
        )  # fmt: skip
        with placed(config, args.devices):
            times = []
            session.next_tokens(16)
            session.next_tokens(16)
            while session.made < args.long:
                start = time.perf_counter()
                got = session.next_tokens(16).shape[1]
                times.append((time.perf_counter() - start) / got)
        early, late = statistics.median(times[:8]), statistics.median(times[-8:])
        results["long"] = {"seconds_per_token_early": early, "seconds_per_token_late": late, "ratio": late / early}
        print(f"a token takes {early * 1e3:.1f} ms at first and {late * 1e3:.1f} ms near token {args.long}")
    packages = {name: version(name) for name in ("jax", "jaxlib", "torch", "transformers")}
    print(json.dumps({"python": platform.python_version(), "cores": cores, **packages, "args": vars(args), **results}))


def placed(config: Any, devices: int) -> Any:
    """The mesh of our run."""
    from contextlib import nullcontext

    from jaxgpt.config import MeshConfig
    from jaxgpt.parallel import make_mesh, use_mesh

    return use_mesh(make_mesh(MeshConfig(data=1, tensor=devices)), config) if devices > 1 else nullcontext()


def ours(hf: Any, layers: int, heads: int, width: int, devices: int) -> tuple[Any, Any]:
    """transformers' weights in our tree, split over the devices."""
    import jax

    from jaxgpt.config import MeshConfig, ModelConfig
    from jaxgpt.convert.nanogpt import params_from_nanogpt
    from jaxgpt.model import GPT
    from jaxgpt.model.params import boxed_params
    from jaxgpt.parallel import make_mesh, shardings

    config = ModelConfig(vocab_size=50257, block_size=1024, n_embd=width, n_layer=layers, n_head=heads)
    tensors = {k: v.numpy() for k, v in hf.state_dict().items() if k != "lm_head.weight"}
    # transformers keeps W as (in, out), nanoGPT as (out, in).
    tensors = {k: v.T if v.ndim == 2 and ".h." in k else v for k, v in tensors.items()}
    params = params_from_nanogpt(tensors, config)
    if devices == 1:
        return config, jax.device_put(params)
    boxed = jax.eval_shape(lambda: boxed_params(GPT(config), 0))
    return config, jax.device_put(params, shardings(boxed, config, make_mesh(MeshConfig(data=1, tensor=devices))))


if __name__ == "__main__":
    main()
