"""`python -m jaxgpt` is `jaxgpt`."""

from jaxgpt.cli import entry

if __name__ == "__main__":
    entry()
