"""Tools for tests of prefixkv and of engines that integrate it: a fabric in memory, byte patterns,
a pair of workers in one process, an engine without weights, and a conformance kit."""
