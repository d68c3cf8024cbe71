"""The HTTP API: its models, for the monitor and its clients, and a server for untrusted clients."""
