"""Describe data: duplicates, overlap, baselines of the loss, and memorized text."""
