"""Run `jaxgpt` as `python -m jaxgpt`."""

from jaxgpt.cli import entry

if __name__ == "__main__":
    entry()
