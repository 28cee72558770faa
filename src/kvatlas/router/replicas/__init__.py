"""Other routers of the fleet: their requests count as load here.

Read `replicas.py` first (ADR-0010).
"""
