"""Tools for tests of engines that integrate prefixkv: byte patterns, an engine without weights, and
a conformance kit."""
