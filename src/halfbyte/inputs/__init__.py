"""What comes from outside, looked at before it is used: files, numbers, names and paths.

Every limit is stated here or beside the reader that has it, and everything that is refused is a ValueError: the
command line turns it into one paragraph and exit code 2. `docs/security.md` says what this protects from and what not.
"""

from .names import check_choices, check_output, check_run_name, home_expanded, printable, refuse_url, user_cache
from .numbers import check_real, check_whole, seconds_of
from .reading import (
    MOST_JSON,
    UnreadableFile,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    read_toml,
    read_yaml,
    regular,
)
from .sealing import sealed_json, sealed_text
from .writing import no_follow, replace_file, write_json
