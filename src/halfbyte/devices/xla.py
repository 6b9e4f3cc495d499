"""Which flags the installed XLA has: one that it does not know ends the process, or a compilation that is given it."""

import functools
import mmap
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def known_to_xla(flag: str) -> bool:
    """True if the installed XLA library has this flag: a function that sets it. Names of flags that were renamed stay
    in the library; a compilation that is given one is refused."""
    spec = find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return False
    for library in Path(next(iter(spec.submodule_search_locations))).glob("libjax_common.*"):
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(f"set_{flag}".encode()) >= 0:
                return True
    return False
