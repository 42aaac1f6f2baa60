"""How a learner's weights reach an engine, and how the engine proves that it computes with them."""
