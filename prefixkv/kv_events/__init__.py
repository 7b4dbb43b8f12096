"""Events of a worker's prefix cache, published to routers in the formats of vLLM and SGLang.

`stream` numbers and keeps batches, `blocks` formats events, `publisher` has the sockets.
"""
