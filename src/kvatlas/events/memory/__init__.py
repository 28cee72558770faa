"""The bus within one process: the adapter for tests and demos. Read `bus.py` first."""
