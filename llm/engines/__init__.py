"""What generates completions: transformers in process, vLLM in process or behind HTTP, and any
OpenAI-compatible server.
"""
