"""Coverage-guided fuzzing of the same targets, with atheris, which is not a dependency:

    python -m venv venv && venv/bin/pip install atheris -e '.[test]'
    venv/bin/python tests/fuzz/guided.py TARGET -max_total_time=90

TARGET is one of `inputs.MAKES`, the rest are options of libFuzzer (-runs=N, ...). Atheris mutates bytes to reach new branches
of jaxgpt. It stops at the first input that neither raises a one-line error nor gives a right result, and saves it as
`crash-...` in the folder that it prints.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from random import Random

import atheris  # type: ignore[import-not-found]

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

with atheris.instrument_imports(include=["jaxgpt"]):
    import targets
    from inputs import MAKES, SHARDS, TENSORS
    from safetensors.numpy import save_file


def main() -> None:
    """Fuzz one target, starting from a hundred inputs of `inputs.py`, in a temporary folder."""
    name, *options = sys.argv[1:]
    os.chdir(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    Path("shards").mkdir()
    for file, names in SHARDS.items():
        save_file({tensor: TENSORS[tensor] for tensor in names}, Path("shards") / file)
    Path("corpus").mkdir()
    for number in range(100):
        rng = Random(number)
        (Path("corpus") / str(number)).write_bytes(rng.choice(MAKES[name])(rng))
    target = getattr(targets, name)
    atheris.Setup([sys.argv[0], *options, "corpus"], lambda data: targets.outcome(target, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
