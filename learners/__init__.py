"""Learners: who turns batches into newer weights."""
