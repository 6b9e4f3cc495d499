"""The processes of a run as one group: they agree before they compute, stop at one step, and end together."""

from .beats import Beat, Limits, judge
from .ending import End, leave
from .group import Disagreement, Group
from .runtime import connect, is_connected, leave_and_exit, on_terminate
from .signals import Signals
