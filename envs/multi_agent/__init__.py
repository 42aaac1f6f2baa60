"""Environments with several agents, each of which is a row of the batch."""
