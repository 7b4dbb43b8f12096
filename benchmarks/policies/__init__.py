"""Eviction policies that do not ship: worked examples of a policy of one's own."""
