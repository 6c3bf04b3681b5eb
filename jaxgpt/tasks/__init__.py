"""Benchmark tasks of lm-evaluation-harness, evaluated in memory: the requests of a task, their answers, and the results."""
