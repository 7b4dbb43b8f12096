"""The control object of each side: it holds rooms and peers. Pure: an input goes in, effects come
out.

`inbox.py` is its deque, `handshake.py` compares two ranks, `lives.py` knows peers' processes.
`runtime/` carries out what `effects.py` names.
"""
