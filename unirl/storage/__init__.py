"""What is kept in files: checkpoints, tensors, and what a full disk does to them."""
