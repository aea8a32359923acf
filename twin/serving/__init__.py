"""Ordinary engines, and what serving makes of an engine's speed: queues, waiting times, costs."""
