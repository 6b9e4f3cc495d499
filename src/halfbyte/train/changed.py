"""What is done about files, data or a config that are not those of the run: an error, or with --allow-change a line."""

from collections.abc import Callable, Sequence

OTHER_DATA = "give the data set that it was started on, --allow-change to go on with this one, or another --run-dir"
OTHER_CONFIG = "give --allow-change to go on with the new values, or another --run-dir"
EDITED = "files of this run were edited, or the disk has changed them"


class ChangedRun(ValueError):
    """Files, data or config are not those of the run."""


def refuse_or_say(
    changes: Sequence[str], *, what: str, remedy: str, allow: bool = False, say: Callable[[str], None] = print
) -> None:
    """Raise ChangedRun, which lists the changes under `what`, if there are any; with `allow`, say each instead."""
    if changes and not allow:
        raise ChangedRun("\n  ".join([f"{what}:", *changes]) + f"\n{remedy}")
    for change in changes:
        say(f"changed, as allowed: {change}")


def data_changes(stored: str | None, content: str) -> list[str]:
    """Returns how a data set differs from what it held before, as a list for `refuse_or_say`; empty if not known."""
    return [] if stored in (None, content) else [f"content of the data set: {stored} -> {content}"]
