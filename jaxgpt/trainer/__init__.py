"""Host side of training: compile functions from a config, run the loop, evaluate, record metrics."""
