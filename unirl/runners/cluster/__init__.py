"""Runner `ray`: members on the nodes of a cluster, the queue and the learner in this process."""
