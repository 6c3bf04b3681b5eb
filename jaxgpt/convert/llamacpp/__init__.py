"""llama.cpp: architectures, metadata and tensor layouts of its models."""
