"""Model cards: README.md files of exported models and adapters."""
