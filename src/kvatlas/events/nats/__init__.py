"""The bus over NATS JetStream: one adapter of the ports in `events/bus.py`. Read `bus.py` first."""
