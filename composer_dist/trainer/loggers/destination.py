"""The base of all loggers."""

from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.logger import Destination
from composer_dist.trainer.logger import Logger as Logger


class LoggerDestination(Callback, Destination):
    """A place that metrics go to. It is a callback too, so that it can open, flush and close.

    Values may be scalar tensors on the device: convert them only when you write, because that waits
    for the device.
    """
