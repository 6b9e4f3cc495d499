"""Reads and writes objects under a prefix of S3 or Google Cloud Storage, through TensorStore. Never lists objects."""

import errno
import os
import re
from collections.abc import Callable
from typing import Any

from halfbyte.checkpoint.checkpoint_record import shorten_error
from halfbyte.io.lazy_import import lazy_module

ts = lazy_module("tensorstore")
ABSENT = b"\x02"  # TensorStore's generation of an object that does not exist
ANSWER_S = 300.0  # per request, with its retries
RETRIES = {"max_retries": 2, "initial_delay": "200ms", "max_delay": "1s"}


class ObjectChanged(ValueError):
    """Raised if another process has written an object."""


class Objects:
    """Objects under `url`. Every method raises OSError, with the address, if the store fails."""

    def __init__(self, url: str):
        self.url, spec = url.rstrip("/"), spec_of(url)
        self._kv = self._request(lambda: ts.KvStore.open(spec))

    def _request(self, start: Callable[[], Any]) -> Any:
        try:
            return start().result(timeout=ANSWER_S)
        except (ValueError, OSError, RuntimeError) as error:  # all types that TensorStore raises
            raise OSError(
                errno.EIO, f"the store does not do what is asked ({shorten_error(error)})", self.url
            ) from error

    def read(self, key: str) -> tuple[bytes | None, bytes]:
        """Returns (content, None if there is no such object; generation)."""
        answer = self._request(lambda: self._kv.read(key))
        return (bytes(answer.value) if answer.state == "value" else None), answer.stamp.generation

    def write(self, key: str, data: bytes | None, generation: bytes = ABSENT) -> bytes:
        """Writes an object, or deletes it (None), if it is `generation`. Returns its new generation. Raises
        ObjectChanged, and changes nothing, if it is another one; not if its content is this already (an interrupted
        upload, an answer that was lost)."""
        if not generation:  # TensorStore would write without a condition
            raise ValueError(f"{self.url}/{key}: no generation is known, so nothing is written or deleted")
        written: bytes = self._request(lambda: self._kv.write(key, data, if_equal=generation)).generation
        if written:
            return written
        content, now = self.read(key)
        if content is None and generation == ABSENT:  # S3 answers a write with 404 if there is no bucket
            raise OSError(errno.EIO, "nothing can be written: there is no such bucket", self.url)
        if content != data:
            raise ObjectChanged(f"{self.url}/{key} was written by another process; it was left as it is")
        return now

    def check_conditions(self, key: str, data: bytes) -> None:
        """Raises ValueError if the server ignores the conditions of writes: `key` exists, as `data`, and creating it
        must fail. Without conditions two writers would overwrite each other unnoticed."""
        if self._request(lambda: self._kv.write(key, data, if_equal=ABSENT)).generation:
            raise ValueError(
                f"{self.url}: this server ignores the conditions of writes (If-None-Match, ifGenerationMatch), so what "
                "others write there would not be safe; use a server that implements them"
            )


def spec_of(url: str) -> dict[str, Any]:
    """Returns TensorStore's spec of an address, with settings from the environment; ValueError if it is invalid."""
    match = re.fullmatch(r"(s3|gs)://([A-Za-z0-9][\w.-]*)(?:/(.*))?", url)
    if match is None:
        raise ValueError(f"{url!r} is not the address of a bucket; write s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    driver, prefix = {"s3": "s3", "gs": "gcs"}[match[1]], (match[3] or "").strip("/")
    # HTTP libraries and servers resolve these: another prefix
    if prefix and ({*prefix.split("/")} & {"", ".", ".."} or "\\" in prefix):
        part = f"{url!r} has an empty part, '.', '..' or a backslash"
        raise ValueError(f"{part}; write s3://BUCKET/PREFIX or gs://BUCKET/PREFIX without it")
    context: dict[str, Any] = {f"{driver}_request_retries": RETRIES}
    spec = {"driver": driver, "bucket": match[2], "path": f"{prefix}/" if prefix else "", "context": context}
    if driver == "s3":
        # Later versions of TensorStore send a write's condition to Amazon's own servers only, unless this is set.
        os.environ.setdefault("TENSORSTORE_S3_USE_CONDITIONAL_WRITE", "1")
        if "AWS_ACCESS_KEY_ID" in os.environ:  # without it the search for credentials logs every missing file
            context["aws_credentials"] = {"type": "environment"}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region}
    return spec
