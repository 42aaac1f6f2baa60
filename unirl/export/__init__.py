"""What a run learned, as files that are used without UniRL."""
