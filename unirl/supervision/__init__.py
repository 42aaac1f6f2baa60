"""Processes that are started, watched, started again when they die, and ended."""
