"""GGUF files: weights, tokenizers and their export."""
