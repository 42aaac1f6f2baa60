"""What of a machine, or of the nodes of a cluster, would hold a run back."""
