"""What all HTTP servers share: protocols, bounds, deadlines, accepted hosts.

Read `limits.py` first.
"""
