"""Language models as actors and learners of the same pipeline: an engine is an actor, a group of
completions a slot, a token a time step.
"""
