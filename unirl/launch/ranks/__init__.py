"""The ranks of a learner: processes of this machine or of a cluster's nodes."""
