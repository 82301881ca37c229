"""One line for the person watching the run, apart from torchtitan's own chatter."""

import logging

STORY = "recipes"
"""Logger name; the launcher shows it on the console and sends everything else to the log file."""


def narrate(message: str) -> None:
    """Say something to the person watching the run (shown by the first rank)."""
    logging.getLogger(STORY).info(message)
