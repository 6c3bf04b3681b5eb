"""Import transformers, nanoGPT and GGUF models and PEFT adapters; export to transformers, GGUF and PEFT."""
