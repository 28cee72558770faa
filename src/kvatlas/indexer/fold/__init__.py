"""The fold: the log in, what every instance holds out. Pure. Read `state.py` first."""
