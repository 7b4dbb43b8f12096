"""Pages of KV: who holds each (`page_allocator`), which a request reads (`page_table`), where the
bytes lie (`kv_layout`), and tensors for those who have none (`kv_pool`, the only module here that
loads torch).
"""
