"""Train a GPT: `python train.py [PRESET] [--flags]`, the same as `jaxgpt train`."""

import sys

from jaxgpt.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
