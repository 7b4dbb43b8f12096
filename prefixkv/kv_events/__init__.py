"""Events of a worker's prefix cache, published to routers in vLLM's format.

`stream` numbers and keeps batches, `blocks` formats events, `publisher` has the sockets.
"""
