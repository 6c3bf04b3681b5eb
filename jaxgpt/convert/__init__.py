"""Import and export models in other formats: transformers, nanoGPT, GGUF, PEFT."""
