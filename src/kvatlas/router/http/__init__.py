"""What all HTTP servers of a process share: bounds, deadlines, accepted hosts. See limits.py."""
