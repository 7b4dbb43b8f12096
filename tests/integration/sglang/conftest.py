"""What is in `inside/` needs SGLang, so its own interpreter collects it."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("sglang") else ["inside"]
