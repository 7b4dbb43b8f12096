"""What a worker's prefix cache does, told to routers in the words of vLLM and SGLang.

`stream` numbers and keeps what was told, `dialects` words it, `publisher` has the sockets.
"""
