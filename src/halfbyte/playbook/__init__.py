"""One decision from the JSON results of several commands: should a cluster switch to 4 bits?"""

from .decision import CANNOT_TELL, DO_NOT, SWITCH, decide
from .page import write_page
from .points import points
from .records import SETTINGS, STAGES, Records
