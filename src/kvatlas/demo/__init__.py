"""The demo: plays requests against a whole fleet on one machine and compares policies."""
