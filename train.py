"""Train a GPT: `python train.py [PRESET] [--flags]`, the same as `jaxgpt train`."""

from jaxgpt.cli import entry

if __name__ == "__main__":
    entry("train")
