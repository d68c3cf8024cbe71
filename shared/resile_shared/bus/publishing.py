"""What the account `publisher` may send (docs/events.md). Apart from `roles`, which takes long to import."""

PUBLISHER_COMMANDS = ("host.drain", "job.pause", "job.priority", "job.resume", "job.stop")
