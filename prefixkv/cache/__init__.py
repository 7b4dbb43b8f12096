"""The radix cache: which pages hold the KV of which tokens, by prefix."""

# Importing a policy makes it known by name.
from prefixkv.cache.eviction import plain as plain
