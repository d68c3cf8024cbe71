"""What a script does that would train wrongly, or differently on another number of workers: each is named."""
