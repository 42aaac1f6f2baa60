"""Episodes of a run, found and opened: from its trajectory store, else from the samples that a
language run writes now and then.
"""
