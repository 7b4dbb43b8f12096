"""Eviction policies and the queues that put their order into practice."""
