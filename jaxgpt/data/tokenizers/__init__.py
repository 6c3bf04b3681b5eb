"""Tokenizers: bytes, characters, BPE and published vocabularies; their special tokens and files."""
