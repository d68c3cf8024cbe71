"""What lasts: curves of jobs and the history of slots, thinned to a bounded size and stored."""
