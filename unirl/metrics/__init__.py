"""Numbers of a run: what is logged, and where the time goes."""
