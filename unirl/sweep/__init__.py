"""Many runs of one config with other settings: which, in what order, how far, and what came out."""
