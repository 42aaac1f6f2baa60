"""Tasks in pure torch, "torch/...": they run wherever torch runs, with nothing to install."""
