"""Should this cluster switch to 4 bits? One answer, the points that it rests on, and the commands that made them.

Every stage leaves one record; size of the study, decision, table and page are functions of the records alone.
"""

from .budget import FEWEST_STEPS, Size, check_budget, could_tell, seconds_of, size_of
from .decision import CANNOT_TELL, DO_NOT, SWITCH, Decision, decide
from .page import write_page
from .records import STAGES, Records
