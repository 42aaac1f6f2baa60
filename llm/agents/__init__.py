"""Language models that act: episodes of many turns, who drives them, and what is kept of them."""
