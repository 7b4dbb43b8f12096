"""The radix cache: which pages hold the KV of which tokens, by prefix."""

from prefixkv.cache import aged as aged  # importing a policy makes it known by name
from prefixkv.cache import gated as gated
from prefixkv.cache import gittins as gittins
from prefixkv.cache import policies as policies
