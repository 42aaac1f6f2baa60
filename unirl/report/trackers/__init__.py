"""Trackers: where a run's numbers go besides metrics.jsonl. One file each, imported when named."""
