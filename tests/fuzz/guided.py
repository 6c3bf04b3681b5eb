"""The same targets, led by coverage, where atheris is installed, which is no dependency:

    python -m venv venv && venv/bin/pip install atheris -e '.[test]'
    venv/bin/python tests/fuzz/guided.py TARGET -max_total_time=90

TARGET is one of `inputs.MAKES`, the rest are options of libFuzzer (-runs=N, ...). Atheris changes bytes so that they reach
new branches of our own code. It stops at the first input that is neither refused in one line nor dealt with rightly, and
keeps it as a file `crash-...` in the folder that it names.
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
    """Fuzz one target from a hundred inputs of `inputs.py`, in a folder of its own."""
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
