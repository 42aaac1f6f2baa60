"""What a run shows and leaves behind: console, log files, curves, videos, its card."""
