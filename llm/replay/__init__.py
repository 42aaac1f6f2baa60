"""Training from the episodes of a store, without engines."""
