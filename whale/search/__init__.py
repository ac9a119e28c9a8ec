"""Chooses what the user did not set: devices, stages, micro-batches, schedule (docs/search.md)."""
