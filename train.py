"""Train a model: `python train.py [PRESET] [OPTIONS]` is the same as `jaxgpt train`."""

from jaxgpt.__main__ import main

if __name__ == "__main__":
    main("train")
