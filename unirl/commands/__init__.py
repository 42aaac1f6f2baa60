"""The subcommands of `unirl`; each imports what is heavy only when it is called."""
