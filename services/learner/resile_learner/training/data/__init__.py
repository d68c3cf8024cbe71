"""Which samples a run uses, in which order, and how they become shards."""
