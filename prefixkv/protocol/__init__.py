"""What the parts of prefixkv say to each other, and the machine of a room for each side. Pure.

`messages.py` has the frames between workers; `commands.py` and `events.py` what scheduler and
control object say to each other; `sender_machine.py` and `receiver_machine.py` one room each.
"""
