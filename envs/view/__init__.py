"""What a policy is shown of an environment."""
