"""Traces, logs and metrics of services."""
