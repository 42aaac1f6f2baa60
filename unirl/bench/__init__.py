"""Measuring: what each stage of a plan can do alone, what all do together, and what limits them."""
