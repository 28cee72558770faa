"""The command line. Read `commands.py` first."""
