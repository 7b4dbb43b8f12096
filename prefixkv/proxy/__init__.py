"""`prefixkv proxy`: OpenAI's interface over prefill and decode servers of an engine with prefixkv's
connector (`docs/vllm.md`). It imports no engine."""
