"""Small games of UniRL's own, each for what no common environment shows: memory, self-play."""
