"""The bus: NATS with its streams and buckets, as services use it. `client` is what a service sees."""
