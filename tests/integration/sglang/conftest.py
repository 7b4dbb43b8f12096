"""What is in `inside/` needs SGLang, so its own interpreter collects it."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("sglang") else ["inside"]
