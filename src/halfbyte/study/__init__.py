"""Equivalence studies, and the playbook that decides from them whether a cluster should switch to 4 bits.

A study compares recipes by paired runs over seeds, tests equivalence within a margin that is fixed in advance, and ends
in one verdict and a report. The playbook reads the JSON results of several commands, a study among them.
"""

from halfbyte.study.playbook_decision import CANNOT_TELL, DO_NOT, SETTINGS, STAGES, SWITCH, StageRecords, make_decision
from halfbyte.study.playbook_report import evidence_rows, write_playbook_report
