"""How slots and weights cross a border: shared memory between processes of one machine."""
