"""Where environment workers and policy workers take turns."""
