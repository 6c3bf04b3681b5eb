"""A run on disk: its directory, checkpoints through Orbax, checksums and the lock."""
