"""One of two processes that exchange values: python pair.py PORT INDEX. Prints the results as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxgpt.config import Config, DistributedConfig, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.errors import UserError

settings = DistributedConfig(coordinator=f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))


def main() -> dict[str, Any]:
    import jax
    import numpy as np

    from jaxgpt.parallel.arrays import to_host
    from jaxgpt.parallel.processes import Poll, is_leader, on_leader, process_count, same_on_all
    from jaxgpt.trainer.build import build

    jax.config.update("jax_num_cpu_devices", 2)
    me, got = jax.process_index(), {}  # type: ignore[var-annotated]

    def refusal(ask: Any) -> str:
        try:
            return f"accepted: {ask()}"
        except UserError as e:
            return str(e)

    def fail() -> None:
        raise UserError(f"process {me} cannot")

    def fail_in_one() -> int:
        return fail() or 0 if me == 1 else 1

    got["count"], got["leader"] = process_count(), is_leader()
    got["decided"] = on_leader(lambda: ["by", me])
    got["refused"] = refusal(lambda: on_leader(fail))
    got["agreed"] = same_on_all(lambda: me, lambda _: {"seed": 1})
    got["disagreed"] = refusal(lambda: same_on_all(lambda: me, lambda me: {"same": 0, "seed": 10 + me}))
    got["disagreed late"] = refusal(lambda: same_on_all(lambda: me, lambda me: {"mix": (*"abcdef", me)}))
    got["failed in one"] = refusal(lambda: same_on_all(fail_in_one, lambda _: {}))
    config = Config(
        model=ModelConfig(vocab_size=8, block_size=4, n_layer=1, n_head=2, n_embd=8),
        train=TrainConfig(batch_size=8),
    )
    for name, mesh in {"data": MeshConfig(data=4), "tensor": MeshConfig(data=2, tensor=2)}.items():
        program, asked = build(Config(model=config.model, train=config.train, mesh=mesh)), []

        class Batch:
            def __len__(self) -> int:
                return 8

            def __getitem__(self, rows: slice, asked: list[Any] = asked) -> np.ndarray:
                if rows.stop > rows.start:  # no rows: the shapes
                    asked.append([rows.start, rows.stop])
                return np.arange(40, dtype=np.int32).reshape(8, 5)[rows]

        whole = to_host(program.put(Batch()))
        got[f"rows, {name}"] = sorted(asked)
        got[f"whole, {name}"] = bool((whole == np.arange(40).reshape(8, 5)).all())
    poll = Poll(program.mesh, 2)
    assert poll.lag == 0  # on CPUs
    got["answers on CPUs"] = [poll.ask({(1, 3): 1, (0, 5): 2}.get((me, call), 0)) for call in range(1, 7)]
    poll.lag = 2  # as on GPUs
    # Process 1 requests 1 at the third call, process 0 requests 2 at the fifth; both see each request two calls later.
    got["answers"] = [poll.ask({(1, 3): 1, (0, 5): 2}.get((me, call), 0)) for call in range(1, 9)]
    return got


if __name__ == "__main__":
    from jaxgpt.parallel.join import joined

    with joined(settings):
        print(json.dumps(main()))
