"""What episodes were, kept beside a run: by task, by step, until they expire; and who learned from
which.
"""
