"""What a model may call, and what it is given back."""
