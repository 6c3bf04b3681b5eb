"""Measure training and generation on this machine, against its measured limits."""
