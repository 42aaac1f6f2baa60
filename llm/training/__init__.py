"""From groups of completions to new weights: packing, packed forward passes, losses, learner."""
