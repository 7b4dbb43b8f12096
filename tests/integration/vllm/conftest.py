"""What runs in vLLM's environment is not looked at for doctests in this one."""

collect_ignore = [
    "governed.py", "liveness", "recorder.py", "spoiler.py", "vllm_command.py", "window_model.py",
]  # fmt: skip
