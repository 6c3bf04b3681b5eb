"""Files that users bring: compression, plain text, JSON and records."""
