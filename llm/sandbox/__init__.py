"""Sandboxes: what runs the programs that a model wrote, and keeps all else from them."""
