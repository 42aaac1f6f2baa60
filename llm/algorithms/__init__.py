"""What an algorithm is made of (advantage, clip, aggregation, correction, KL), and presets."""
