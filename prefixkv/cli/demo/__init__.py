"""`prefixkv demo`: chats with a small model over worker processes, decode's cache on and off.

- `workload`: seeded conversations, as runs of tokens.
- `workers`: a prefill and decode workers as `prefixkv worker` runs them, and requests to them.
- `play`: conversations that continue as they are answered.
- `report`: figures, the table that README shows, and pictures.
- `command`: the whole demo; every answer is compared with what transformers generates by itself.
"""
