"""Questions with their answers, and the prompts that they become."""
