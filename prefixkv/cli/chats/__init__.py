"""Chats with a real model over worker processes: `prefixkv demo`.

- `workload`: seeded conversations, as runs of tokens.
- `workers`: a prefill and decode workers as `prefixkv worker` runs them, and requests to them.
- `play`: conversations that continue as they are answered.
- `report`: figures, their tables, and one conversation turn by turn.
- `command`: the whole part; every answer is compared with what transformers generates by itself.
"""
