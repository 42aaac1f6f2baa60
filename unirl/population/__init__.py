"""Several learners of one plan that learn settings from each other (arXiv 1711.09846)."""
