"""Post-training: objectives beyond the next token, on top of the same training loop."""
