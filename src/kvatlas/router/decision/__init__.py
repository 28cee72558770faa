"""Where a request goes: candidates, loads, prices, policies, plans. Read `candidates.py` first."""
