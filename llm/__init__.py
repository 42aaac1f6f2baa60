"""Language models as actors and learners of the same pipeline; empty so far."""
