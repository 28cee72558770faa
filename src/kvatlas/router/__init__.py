"""Where a request goes: candidates, policies, plans, decisions, HTTP."""
