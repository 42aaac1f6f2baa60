"""Stored episodes in the formats of others."""
