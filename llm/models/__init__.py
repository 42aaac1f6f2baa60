"""Language models as transformers loads them, and the small ones that need no download."""
