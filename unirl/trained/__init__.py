"""Runs that were trained, from Python: loaded, evaluated, acted with."""
