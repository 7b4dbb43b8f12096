"""The cluster is a process of another interpreter, which alone has Ray."""

collect_ignore = ["nodes.py"]
