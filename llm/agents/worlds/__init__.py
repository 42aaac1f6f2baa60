"""Environments that answer what a model says: simulators, servers and folders of tasks."""
