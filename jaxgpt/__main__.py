"""Run `jaxgpt` as a console script or as `python -m jaxgpt`."""

import sys


def main(*before: str) -> None:
    """Run a command; `before` precedes the command-line arguments."""
    try:
        from jaxgpt.cli import entry

        entry(*before)
    except KeyboardInterrupt:  # during the imports; `jaxgpt.cli.main` handles it during a command
        print("jaxgpt: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
