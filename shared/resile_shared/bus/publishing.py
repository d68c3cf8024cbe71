"""What the account `publisher` may send (docs/events.md). Separate from `roles`, which is slow to import."""

PUBLISHER_COMMANDS = ("host.drain", "job.pause", "job.priority", "job.resume", "job.stop")
