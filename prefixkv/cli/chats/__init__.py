"""Chats with a real model over worker processes: `prefixkv demo`.

- `workload`: seeded conversations, as runs of tokens.
- `workers`: a prefill and decode workers as `prefixkv worker` runs them, and requests to them.
- `play`: conversations that go on as they are answered.
- `report`: figures, their tables, and one conversation turn by turn.
- `command`: all of it, every answer compared with what transformers says by itself.
"""
