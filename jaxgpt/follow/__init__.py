"""Followers: separate processes that send the metrics of a run to trackers. The run itself only writes metrics.jsonl."""
