"""Loss, optimizer, the pure step, the host's loop, checkpoints and metrics."""
