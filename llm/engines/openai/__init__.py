"""Servers that speak OpenAI's API and return token ids and log-probabilities."""
