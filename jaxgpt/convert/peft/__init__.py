"""PEFT adapters: import and export."""
