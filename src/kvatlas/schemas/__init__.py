"""What travels: identity, events, transfers, decisions, and the errors about them."""
