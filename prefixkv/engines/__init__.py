"""Engines that come with the library: references for those that integrate it, and what serves."""
