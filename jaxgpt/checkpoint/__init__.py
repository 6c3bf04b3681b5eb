"""A run on disk: its directory, Orbax checkpoints, checksums and lock."""
