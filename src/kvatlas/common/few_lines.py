"""Log lines about what others send: the 1st, the 10th, the 100th and so on, with its number."""

import logging


class FewLines:
    """Writes few of the lines that others can cause at will; one thread at a time."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        #: lines that there would have been
        self.num_lines = 0

    def warn(self, text: str, *args: object) -> None:
        """Write a line, or count it only."""
        self.num_lines += 1
        if self.num_lines == 10 ** (len(str(self.num_lines)) - 1):
            self._logger.warning(f"{text} (%d in all)", *args, self.num_lines)
