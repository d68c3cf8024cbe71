"""The agent's side of worker processes: start them warm, hear them, tell their ends apart.

Nothing here loads torch into the agent's own process.
"""
