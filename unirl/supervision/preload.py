"""What the fork server loads before it forks; imported there and nowhere else."""

import gc

import unirl.supervision.worker  # noqa: F401  and torch with it

# The collector would write to every object it visits, and so copy the shared pages; one pass would
# copy as many, and keep the first process waiting.
gc.freeze()
