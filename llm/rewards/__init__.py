"""What judges completions: rules, models, judges and own code, each within its time."""
