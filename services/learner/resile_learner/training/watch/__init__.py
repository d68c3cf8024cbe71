"""Refuses what a script does that would train wrongly, or differently on another number of workers."""
