"""Reading streams and subjects of NATS: ranges, follow, subscriptions. Read `follow.py` first."""
