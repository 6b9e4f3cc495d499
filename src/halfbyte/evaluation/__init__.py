"""What a trained model can do: text from a prompt, scores on local tasks, and curves of several runs side by side."""

from halfbyte.evaluation.generation import Generated, Generator
from halfbyte.evaluation.language_model import SCORING_RULES, WRITING_RULES, LanguageModel
from halfbyte.evaluation.sampling import Sampling
from halfbyte.evaluation.scoring import Request, Score, Scorer
from halfbyte.evaluation.task_files import TEXT, TaskFile, UnknownFormat, chosen, examples, open_task
from halfbyte.evaluation.tasks import Metric, Result, first_windows, run_task, validation_result
