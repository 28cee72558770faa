"""A nats-server of our own, and what keeps it running. Read `server.py` first."""
