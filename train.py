"""Train a model: `python train.py [PRESET] [OPTIONS]` is the same as `jaxgpt train`."""

from jaxgpt.cli import entry

if __name__ == "__main__":
    entry("train")
