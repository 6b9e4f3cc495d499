"""The corpus inside the package, prepared on first use.

Addresses on the State of the Union, public domain (see demo/PROVENANCE.md), with a byte-level BPE of 1,024 made from
them. Some addresses are held out, whole, for validation.
"""

import hashlib
import sys
from importlib import resources
from pathlib import Path

from halfbyte.data.dataset import Dataset, open_dataset
from halfbyte.data.manifest import VERSION
from halfbyte.data.preparation import prepare
from halfbyte.inputs import user_cache

SOURCE = "sotu"
TRAIN_FILE, VALIDATION_FILE, TOKENIZER_FILE = "sotu-train.jsonl.xz", "sotu-validation.jsonl.xz", "tokenizer.json"


def demo_files() -> tuple[Path, Path, Path]:
    """(training text, validation text, tokenizer.json) as installed with the package."""
    folder = Path(str(resources.files("halfbyte.data"))) / "demo"
    return folder / TRAIN_FILE, folder / VALIDATION_FILE, folder / TOKENIZER_FILE


def demo_dataset(cache_dir: str | Path | None = None, *, seq_len: int = 128) -> Dataset:
    """The embedded corpus, verified; prepared into the cache the first time, in a few seconds.

    Processes that race prepare it twice, and one of them publishes it. A damaged cache is named and made anew.
    """
    train, validation, tokenizer = demo_files()
    identity = hashlib.sha256(b"".join(path.read_bytes() for path in demo_files())).hexdigest()[:12]
    root = Path(cache_dir).expanduser() if cache_dir is not None else user_cache()
    place = root / f"demo-v{VERSION}-{identity}-seq{seq_len}"
    overwrite = False
    if place.exists():
        try:
            return open_dataset(place)
        except ValueError as error:
            print(f"the cached demo data set is damaged and is prepared again: {error}", file=sys.stderr)
            overwrite = True
    try:
        prepare(
            [train], tokenizer=tokenizer, out=place, seq_len=seq_len, validation=[validation], default_source=SOURCE,
            workers=1, overwrite=overwrite,
        )  # fmt: skip
    except OSError as error:
        raise ValueError(
            f"the demo data set cannot be written into {root} ({error.strerror}); "
            "set HALFBYTE_CACHE to a directory that can be written"
        ) from error
    return open_dataset(place)
