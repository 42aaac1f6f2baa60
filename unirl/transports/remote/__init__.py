"""The transport between machines: the queue is in the learner's process, and each node has one
connection for slots and one for weights.
"""
