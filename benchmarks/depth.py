"""Time of init and first step, including compilation, by depth, with scanned and unrolled layers.

python benchmarks/depth.py                      4, 12 and 48 layers, 32 wide; a few minutes on 2 cores
python benchmarks/depth.py --depths 4 --json    a quick check
"""

from __future__ import annotations

import argparse
import json
import os
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 12, 48])
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    import jaxgpt  # noqa: F401, I001  (before jax: it sets a flag)

    import jax
    import numpy as np

    from jaxgpt.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig
    from jaxgpt.trainer.build import build

    rows = []
    for scan in (True, False):
        for depth in args.depths:
            config = Config(
                model=ModelConfig(vocab_size=96, block_size=32, n_layer=depth, n_head=2, n_embd=32),
                optim=OptimConfig(name=args.optimizer),
                train=TrainConfig(batch_size=4, scan_layers=scan),
                mesh=MeshConfig(data=1),
            )
            program = build(config)
            start = time.perf_counter()
            state = jax.block_until_ready(program.init())
            ready = time.perf_counter()
            jax.block_until_ready(program.step(state, program.put(np.zeros((4, 33), np.int32))))
            row = {
                "layers": depth,
                "scanned": scan,
                "init_seconds": round(ready - start, 2),
                "step_seconds": round(time.perf_counter() - ready, 2),
            }
            rows.append(row)
            if not args.json:
                print(row, flush=True)
    if args.json:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        print(json.dumps({"rows": rows, "optimizer": args.optimizer, "cores": cores, "jax": jax.__version__}, indent=2))


if __name__ == "__main__":
    main()
