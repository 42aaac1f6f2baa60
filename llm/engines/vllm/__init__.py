"""vLLM in processes of its own, or as a server."""
