"""Sessions behind HTTP, for agents that speak to a language model and know nothing of UniRL."""
