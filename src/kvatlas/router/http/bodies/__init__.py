"""Bodies and queries of requests to typed values. Read `requests.py` first."""
