"""What runs in vLLM's environment is not looked at for doctests in this one."""

collect_ignore = [
    "liveness", "recorder.py", "spoiler.py", "window_model.py",
]  # fmt: skip
