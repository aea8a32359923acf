"""Models of ordinary engines that batch requests, and what load makes of their speed: queues,
waiting times, costs.
"""
