"""The host's side of training: config to compiled functions, the loop, evaluation, metrics."""
