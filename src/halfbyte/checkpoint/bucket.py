"""Objects under a prefix of S3 or Google Cloud Storage, by TensorStore, with one operation that two writers cannot both
win: compare and swap.
"""

import os
import re
from collections.abc import Callable
from typing import Any

from halfbyte.later import later

from .record import one_line

ts = later("tensorstore")
URL = re.compile(r"(s3|gs)://([A-Za-z0-9][\w.-]*)/?(.*)")
ANSWER = 120.0  # seconds that one request may take, its few retries within
_RETRIES = {"max_retries": 2, "initial_delay": "200ms", "max_delay": "1s"}


class StoreFailed(OSError):
    """The store did not answer, or not as a store does."""


class HeadTaken(OSError):
    """Another process has replaced the head."""


class Bucket:
    """Objects under one prefix. Every method raises StoreFailed, with the address, when the store does not answer."""

    def __init__(self, url: str):
        found = URL.fullmatch(url)
        if found is None:
            raise ValueError(f"--run-dir {url}: a store is s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, or a local path")
        self.url, (kind, bucket, prefix) = url.rstrip("/"), found.groups()
        path = prefix.strip("/") + "/" if prefix.strip("/") else ""
        driver = {"s3": "s3", "gs": "gcs"}[kind]
        spec: dict[str, Any] = {"driver": driver, "bucket": bucket, "path": path}
        spec["context"] = {f"{driver}_request_retries": _RETRIES}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if kind == "s3" and endpoint:
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region}
        self._kv = self._asked(lambda: ts.KvStore.open(spec))

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask().result(timeout=ANSWER)
        except (ValueError, OSError, RuntimeError) as error:  # TensorStore's words for all that may happen
            raise StoreFailed(f"{self.url} does not answer as a store does: {one_line(error)[:300]}") from error

    def read(self, name: str) -> tuple[bytes | None, bytes]:
        """(what is there, None if nothing is; which generation of it)."""
        found = self._asked(lambda: self._kv.read(name))
        return (bytes(found.value) if found.state == "value" else None), found.stamp.generation

    def write(self, name: str, data: bytes) -> None:
        """Replace an object."""
        self._asked(lambda: self._kv.write(name, data))

    def swap(self, name: str, data: bytes, seen: bytes) -> bytes:
        """Replace an object if it is still the generation `seen`: the generation that it is now. HeadTaken if not."""
        made: bytes = self._asked(lambda: self._kv.write(name, data, if_equal=seen)).generation
        if not made:
            raise HeadTaken(f"another process has taken the run in {self.url}")
        return made

    def names(self) -> list[str]:
        """Every object under the prefix."""
        return [name.decode() for name in self._asked(lambda: self._kv.list())]

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        self._asked(lambda: self._kv.write(name, None))
