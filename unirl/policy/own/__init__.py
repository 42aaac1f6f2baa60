"""Networks of one's own in a policy: as torso, or as all of it."""
