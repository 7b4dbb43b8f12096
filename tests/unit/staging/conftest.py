"""Protects staging's two machines rule by rule, without a transport: leases, receiver, sender.
The lease table's model is laws/lease_machine; with bytes and ranks, tests/support/sim_engines."""
