"""The lines that a process of ours logs: when, who, how bad, what; one form for all roles."""

import logging

FORM = "%(asctime)s {who} %(levelname)s %(message)s"


def write_log_lines(who: str) -> None:
    """Write log lines to stderr: ours from INFO on, those of libraries from WARNING on."""
    logging.basicConfig(level=logging.WARNING, format=FORM.format(who=who))
    logging.getLogger("kvatlas").setLevel(logging.INFO)
