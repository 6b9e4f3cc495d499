"""An S3 server on loopback, as much of one as a client of objects asks for: PUT, GET, DELETE, lists, conditions. It can
be slow, cut answers off, and be gone. Beside it `moto`'s server is tried where it is installed.
"""

import hashlib
import socket
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape


class S3:
    """A bucket of any name. `faults` are taken one a request: seconds to wait, "refuse" (503), or "cut". `before_put`
    is called with the key of an object that has arrived whole, before it is there."""

    def __init__(self):
        self.objects, self.faults, self.lock, self.conditional = {}, [], threading.Lock(), 0
        self.before_put = lambda key: None
        self._kept = socket.socket()  # the port stays ours while the server is gone: it is bound, and nobody listens
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port = self._kept.getsockname()[1]
        self.start()

    def start(self):
        self._server = _Server(("127.0.0.1", self.port), type("Handler", (_Handler,), {"s3": self}))
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self):
        """Gone: connections are refused. `start` has it back, with what it held."""
        self._server.shutdown()
        self._server.server_close()

    def close(self):
        """Gone for good."""
        self.stop()
        self._kept.close()

    @property
    def environment(self):
        """What a process needs to find it."""
        known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}
        return known | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}


class _Server(ThreadingHTTPServer):
    allow_reuse_port = daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # one connection a request, so that a server that is gone is gone

    def log_message(self, *_):
        pass

    def _answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _key(self):
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def _is_faulty(self):
        fault = self.s3.faults.pop(0) if self.s3.faults else None
        if isinstance(fault, float):
            time.sleep(fault)
        elif fault == "refuse":
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
        elif fault == "cut":
            self.close_connection = True
            self.connection.close()
        return fault in ("refuse", "cut")

    def do_PUT(self):
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length or self._is_faulty():  # the first: whoever sent it was killed
            return
        self.s3.before_put(self._key())
        key, tag = self._key(), f'"{hashlib.md5(body).hexdigest()}"'
        with self.s3.lock:
            now = self.s3.objects.get(key)
            expected, absent = self.headers.get("If-Match"), self.headers.get("If-None-Match")
            self.s3.conditional += bool(expected or absent)
            if (absent and now is not None) or (expected and (now is None or now[1] != expected)):
                return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            self.s3.objects[key] = body, tag
        self._answer(200, ETag=tag)

    def do_GET(self):
        if self._is_faulty():
            return
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        if "list-type" in query or not self._key():
            return self._list(query.get("prefix", ""))
        found = self.s3.objects.get(self._key())
        if found is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if self.headers.get("If-None-Match") == found[1]:
            return self._answer(304, ETag=found[1])
        self._answer(200, found[0], ETag=found[1])

    do_HEAD = do_GET

    def _list(self, prefix):
        keys = [key for key in sorted(self.s3.objects) if key.startswith(prefix)]
        items = "".join(
            f"<Contents><Key>{escape(k)}</Key><Size>{len(self.s3.objects[k][0])}</Size></Contents>" for k in keys
        )
        text = f"<KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>{items}"
        self._answer(200, f"<ListBucketResult>{text}</ListBucketResult>".encode(), Content_Type="application/xml")

    def do_DELETE(self):
        if self._is_faulty():
            return
        self.s3.objects.pop(self._key(), None)
        self._answer(204)
