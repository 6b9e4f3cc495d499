"""What a training step would do on a cluster that nobody has to own: compiled for it, read, and simulated."""

from .budget import break_even, budget, overhead_of, overheads, tokens_of
from .calibration import ASSUMED, BAND, FITTED, FORMS_TRIED, residual
from .cluster import Cluster, cluster, placed
from .outcome import Outcome, as_json, outcome, problems
from .pictures import COLUMNS, LONGEST, cells, longest, page, trace
from .reading import Reading, by_hand, can_compile, reading
from .schedule import Event, schedule, walk
from .search import Candidate, search
from .simulate import Timeline, simulate
