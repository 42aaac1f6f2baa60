"""Environments: one step API over Gymnasium, EnvPool and ale-py, with next-step autoreset
everywhere."""
