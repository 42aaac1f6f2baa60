"""Actors: who produces samples. `vector` unrolls vectorised environments, `evaluate` plays whole
episodes.
"""
