"""Weights and recipes of other systems, in and out."""
