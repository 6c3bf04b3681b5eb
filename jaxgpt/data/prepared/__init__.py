"""Prepared data: documents, encoded into shards of ids with an index."""
