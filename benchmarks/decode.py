"""Speed of generation compared with transformers or llama.cpp.

All models have the same shape, with random weights; the sides (a library and a dtype) alternate in one process.

python benchmarks/decode.py                     GPT-2's 124M shape, batch 1 and 8, prompts of 16 tokens, 128 new tokens
python benchmarks/decode.py --layers 2 --repeats 2 --batches 1    a quick check
python benchmarks/decode.py --peers llama.cpp --kinds float32 int8    CPU; needs xllamacpp and gguf, and an idle machine
python benchmarks/decode.py --shape smollm2-135m     a Llama with grouped-query attention
python benchmarks/decode.py --compiled          also compare with transformers' static cache under torch.compile (GPU)

jaxgpt and transformers use the GPU if there is one, and share its memory. Speeds and bandwidth are medians. A failed
side is skipped, and its error is printed. A line of JSON with the results so far is printed after the first two calls
of each side and after every later round. Needs torch; the default peer needs transformers. The speed limit is batch size x
read bandwidth / bytes of float32 weights read per step; the bandwidth is measured before each timed call.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train_step import QUEUED, about, device_name, torch_device

LLAMA = {"positions": "rope", "norm": "rmsnorm", "mlp": "gated", "activation": "silu", "bias": False}
SHAPES: dict[str, dict[str, Any]] = {  # model settings of each --shape
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    "smollm2-135m": {"n_layer": 30, "n_head": 9, "n_kv_head": 3, "n_embd": 576, "n_inner": 1536, "vocab_size": 49152}
    | LLAMA,
    "toy": {"n_layer": 1, "n_head": 2, "n_embd": 32},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--layers", type=int, default=0, help="number of layers; 0: as in --shape")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="number of CPU devices to shard jaxgpt's weights over")
    parser.add_argument("--kinds", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--peers", nargs="+", choices=("transformers", "llama.cpp"), default=["transformers"])
    parser.add_argument(
        "--compiled", action="store_true", help="also measure transformers with a static cache, compiled"
    )
    parser.add_argument("--top-k", type=int, default=0, help="top-k in jaxgpt and transformers; 0: greedy")
    parser.add_argument(
        "--long", type=int, default=0, help="tokens of an additional jaxgpt text, timed at its start and end; 0: off"
    )
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # GPU memory shared by the sides

    from jaxgpt.runtime import set_quick_flag  # noqa: I001  (before jax: the import sets a flag)

    import jax

    set_quick_flag()
    jax.config.update("jax_num_cpu_devices", args.devices)
    import numpy as np
    import torch

    from jaxgpt.decoding import Sampler, SamplingParams
    from jaxgpt.kernels import of_device
    from jaxgpt.lm import engine
    from jaxgpt.lm.weights import quantize
    from jaxgpt.model import GPT

    torch.set_num_threads(cores)
    device = torch_device()
    settings = {"vocab_size": 50257, "block_size": 1024} | SHAPES[args.shape]
    if args.layers:
        settings["n_layer"] = args.layers
    config, params = ours(settings, args.devices)
    rng = np.random.default_rng(0)
    tensor = torch.from_numpy(rng.standard_normal(500_000_000 // 4).astype(np.float32)).to(device)

    @functools.cache
    def hf(kind: str) -> Any:
        import transformers

        transformers.logging.set_verbosity_error()
        tokens: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
        if config.positions == "learned":
            like: Any = transformers.GPT2Config(
                n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, **tokens
            )
        else:
            like = transformers.LlamaConfig(
                vocab_size=config.vocab_size, hidden_size=config.n_embd, intermediate_size=config.n_inner,
                num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
                num_key_value_heads=config.n_kv_head, max_position_embeddings=config.block_size,
                tie_word_embeddings=True, **tokens,
            )  # fmt: skip
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(like).to(device, getattr(torch, kind)).eval()

    def theirs(kind: str, batch: int, compiled: bool = False) -> Callable[[], Any]:
        import transformers

        model = hf(kind)
        ids = torch.from_numpy(rng.integers(0, 49_000, (batch, args.prompt))).to(device)
        how: dict[str, Any] = {"do_sample": False, "max_new_tokens": args.new, "min_new_tokens": args.new}
        if args.top_k:
            how |= {"do_sample": True, "top_k": args.top_k}
        if compiled:
            how |= {"cache_implementation": "static", "compile_config": transformers.CompileConfig()}
        return lambda: model.generate(ids, **how).cpu()

    def llama_cpp(kind: str, batch: int) -> Callable[[], Any]:
        from llama_cpp import LlamaCpp, write_gguf

        with tempfile.TemporaryDirectory() as directory:
            write_gguf(file := Path(directory, "model.gguf"), config, kind)
            server = LlamaCpp(file, batch)
        prompts = rng.integers(0, 49_000, (batch, args.prompt)).tolist()
        return lambda: server.generate(prompts, args.new)

    sampling = SamplingParams(temperature=1, top_k=args.top_k) if args.top_k else SamplingParams(temperature=0)

    def mine(kind: str, batch: int) -> Callable[[], Any]:
        low = quantize(params, config, kind)  # type: ignore[arg-type]
        prompts = rng.integers(0, 49_000, (batch, args.prompt)).tolist()
        keys = jax.random.split(jax.random.key(0), batch)
        sampler = Sampler(GPT(config, of_device(jax.local_devices()[0])), sampling)

        def run() -> Any:
            with placed(config, args.devices):
                state = engine.start(sampler, low, prompts, keys, [args.new] * batch)
                return engine.new_ids(engine.run(sampler, low, state, args.new))

        return run

    results: dict[str, Any] = about() | {
        "args": vars(args),
        "devices": {lib: device_name(lib) for lib in ("jax", "torch")},
    }
    nbytes = sum(leaf.nbytes for name in params if name != "wpe" for leaf in jax.tree.leaves(params[name]))

    def report(batch: int, seconds: dict[str, list[float]], first: dict[str, float], errors: dict[str, str]) -> None:
        speed = {name: args.new * batch / statistics.median(times) for name, times in seconds.items() if times}
        limit = statistics.median(read) * 1e9 / nbytes * batch
        theirs, mine = speed.get(f"{args.peers[0]} float32"), speed.get("jaxgpt float32")
        results[f"batch {batch}"] = {
            "tokens_per_second": speed,
            "first_call_seconds": first,
            "errors": errors,
            "read_gb_per_second": statistics.median(read),
            "limit_float32": limit,
            "of_limit": mine and mine / limit,
            "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            f"over_{args.peers[0]}": {n: s / theirs for n, s in speed.items()} if theirs else {},
        }
        print(json.dumps(results), flush=True)

    kinds = ["float32", *(["bfloat16"] if "bfloat16" in args.kinds else [])]
    for batch in args.batches:
        sides = {f"jaxgpt {kind}": functools.partial(mine, kind, batch) for kind in args.kinds}
        if "transformers" in args.peers:
            sides |= {f"transformers {kind}": functools.partial(theirs, kind, batch) for kind in kinds}
        if "llama.cpp" in args.peers:
            kinds_of_both = [kind for kind in args.kinds if kind != "bfloat16"]
            sides |= {f"llama.cpp {kind}": functools.partial(llama_cpp, kind, batch) for kind in kinds_of_both}
        if args.compiled:  # the last side, because of its compilation time
            sides[f"transformers {kinds[-1]} compiled"] = functools.partial(theirs, kinds[-1], batch, compiled=True)
        runs: dict[str, Callable[[], Any]] = {}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        first: dict[str, float] = {}
        errors: dict[str, str] = {}
        read: list[float] = []
        for turn in range(args.repeats):
            for name, side in sides.items():
                if name in errors:
                    continue
                try:
                    if not turn:
                        runs[name] = side()
                        start = time.perf_counter()
                        runs[name]()
                        first[name] = time.perf_counter() - start
                    read.append(read_bandwidth(tensor) / 1e9)
                    start = time.perf_counter()
                    runs[name]()
                    seconds[name].append(time.perf_counter() - start)
                except Exception as e:
                    traceback.print_exc()
                    errors[name] = " ".join(f"{type(e).__name__}: {e}".split())[:300]
                    seconds[name], read = [], read or [read_bandwidth(tensor) / 1e9]
                if not turn:
                    report(batch, seconds, first, errors)
            if turn:
                report(batch, seconds, first, errors)
        row = results[f"batch {batch}"]
        limit = row["limit_float32"]
        print(
            f"batch {batch}: memory read at {row['read_gb_per_second']:.1f} GB/s, limit {limit:.0f} tokens/s in float32"
        )
        for name, value in row["tokens_per_second"].items():
            ratio = row[f"over_{args.peers[0]}"].get(name)
            versus = f"{ratio:.2f} x {args.peers[0]} float32, " if ratio else ""
            print(f"  {name:30} {value:7.1f} tokens/s, {versus}{value / limit:.0%} of the limit")
        for name, error in errors.items():
            print(f"  {name:30} {error}")
    if args.long:
        sampler = Sampler(GPT(config, of_device(jax.local_devices()[0])), sampling)
        keys, times = jax.random.split(jax.random.key(0), 1), []
        with placed(config, args.devices):
            state = engine.start(sampler, params, [[1] * args.prompt], keys, [args.long])
            state = engine.run(sampler, params, state, 16)
            while (before := int(state.made)) < args.long:
                start = time.perf_counter()
                state = jax.block_until_ready(engine.run(sampler, params, state, 16))
                times.append((time.perf_counter() - start) / (int(state.made) - before))
        early, late = statistics.median(times[:8]), statistics.median(times[-8:])
        results["long"] = {"seconds_per_token_early": early, "seconds_per_token_late": late, "ratio": late / early}
        print(f"a token takes {early * 1e3:.1f} ms at first and {late * 1e3:.1f} ms near token {args.long}")
    print(json.dumps(results), flush=True)
    failed = {
        name for row in results.values() if isinstance(row, dict) for name in row.get("errors", ()) if "jaxgpt" in name
    }
    if failed:
        raise SystemExit(f"{', '.join(sorted(failed))} failed: see above")


def read_bandwidth(tensor: Any) -> float:
    """Measure the read bandwidth of a sum, in bytes per second.

    On a GPU, several sums are timed together, because dispatching and blocking take as long as one sum.
    """
    sums = QUEUED if tensor.is_cuda else 1
    start = time.perf_counter()
    for _ in range(sums):
        total = tensor.sum()
    total.item()
    return sums * tensor.nbytes / (time.perf_counter() - start)


def placed(config: Any, devices: int) -> Any:
    """Return a context manager that sets jaxgpt's mesh, or a null context on one device."""
    from contextlib import nullcontext

    from jaxgpt.config import MeshConfig
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.parallel.rules import use_mesh

    return use_mesh(make_mesh(MeshConfig(data=1, tensor=devices)), config) if devices > 1 else nullcontext()


def ours(settings: dict[str, Any], devices: int) -> tuple[Any, Any]:
    """Return a config, and random weights sharded over the devices."""
    import jax

    from jaxgpt.config import MeshConfig, ModelConfig
    from jaxgpt.model import GPT
    from jaxgpt.model.init import boxed_params, init_params
    from jaxgpt.parallel.compile_options import random_bits_by_kernel
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.parallel.rules import shardings

    config = ModelConfig(**settings)
    init = functools.partial(init_params, GPT(config))
    if devices == 1:
        with random_bits_by_kernel(make_mesh(MeshConfig(data=1))):
            return config, jax.jit(init)()
    boxed = jax.eval_shape(lambda: boxed_params(GPT(config), 0))
    places = shardings(boxed, config, make_mesh(MeshConfig(data=1, tensor=devices)))
    return config, jax.jit(init, out_shardings=places)()


if __name__ == "__main__":
    main()
