"""What the process with the engine tells the one that speaks HTTP, when it is ready."""

from typing import NamedTuple

from jflash.server.settings import Settings
from jflash.serving.pipe.remote import News, Sizes


class Rules(NamedTuple):
    """Who may ask, and for how long the server waits, in seconds."""

    keys: list[str]
    origins: list[str]
    shutdown_timeout: float
    hang_timeout: float


class Start(NamedTuple):
    """The first message."""

    settings: Settings
    sizes: Sizes
    rules: Rules
    news: News
