"""S3 and Google Cloud Storage on loopback: moto's server and gcp-storage-emulator, each behind a proxy that writes down
every request, and can be slow, refuse, cut connections and be gone.

gcp-storage-emulator knows no conditions (`ifGenerationMatch`) and returns no generation with an object's content, so
the proxy adds both.
"""

import functools
import http.client
import json
import logging
import re
import secrets
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections import namedtuple
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Request = namedtuple("Request", "method key status conditions")  # key: BUCKET/OBJECT, unquoted
JSON = {"Content-Type": "application/json"}
AS = "AWS4-HMAC-SHA256 Credential=a/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
SIGNED = {"Authorization": AS}
WRITES = ("PUT", "POST", "DELETE", "PATCH")


class Proxy:
    """Forwards to `port` of this machine. `log`: every request that was answered. `faults` are taken one per request:
    seconds to wait, "refuse" (503), "cut", "lose" (done, but the answer is cut off). `before(method, key)` is called
    when a request has arrived whole, and may return a status to refuse it with."""

    def __init__(self, port, kind):
        self.backend, self.kind, self.scheme, self.log, self.faults = port, kind, kind, [], []
        self.bucket, self.lock = f"bucket-{secrets.token_hex(4)}", threading.Lock()
        self.before = lambda method, key: None
        self._kept = socket.socket()  # the port stays ours while the server is gone: bound, and nobody listens
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port = self._kept.getsockname()[1]
        self.start()

    def start(self):
        self._server = _Server(("127.0.0.1", self.port), type("Handler", (_Handler,), {"proxy": self}))
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self):
        """Gone: connections are refused. `start` has it back."""
        self._server.shutdown()
        self._server.server_close()

    def close(self):
        self.stop()
        self._kept.close()

    @property
    def environment(self):
        """What a process needs to find it."""
        address = f"http://127.0.0.1:{self.port}"
        if self.kind == "gs":
            return {"TENSORSTORE_GCS_HTTP_URL": address, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}
        known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}
        return known | {"AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1"}

    # Its own view of the objects, past log and faults.

    def _ask(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.backend, timeout=60)
        connection.request(method, path, body=body, headers={**SIGNED, **headers})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content

    def _path(self, key):
        quoted = urllib.parse.quote(key, safe="/" if self.kind == "s3" else "")
        return f"/{self.bucket}/{quoted}" if self.kind == "s3" else f"/storage/v1/b/{self.bucket}/o/{quoted}?alt=media"

    def make(self):
        if self.kind == "s3":
            status, _ = self._ask("PUT", f"/{self.bucket}")
        else:
            status, _ = self._ask("POST", "/storage/v1/b?project=p", json.dumps({"name": self.bucket}), **JSON)
        assert status == 200, status

    def put(self, key, data):
        name = urllib.parse.quote(key, safe="")
        upload = f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}"
        status, content = (
            self._ask("PUT", self._path(key), data)
            if self.kind == "s3"
            else self._ask("POST", upload, data, **{"Content-Type": "application/octet-stream"})
        )
        assert status == 200, (status, content)

    def get(self, key):
        status, content = self._ask("GET", self._path(key))
        return content if status == 200 else None

    def remove(self, key):
        self._ask("DELETE", self._path(key).partition("?")[0])

    def objects(self):
        """key -> content of every object."""
        if self.kind == "s3":
            keys, after = [], ""
            while True:
                token = f"&continuation-token={urllib.parse.quote(after)}" if after else ""
                _, content = self._ask("GET", f"/{self.bucket}?list-type=2&encoding-type=url{token}")
                text = content.decode()
                keys += [urllib.parse.unquote_plus(key) for key in re.findall("<Key>(.*?)</Key>", text)]
                found = re.search("<NextContinuationToken>(.*?)</NextContinuationToken>", text)
                if not found:
                    break
                after = found[1]
        else:
            _, content = self._ask("GET", f"/storage/v1/b/{self.bucket}/o")
            keys = [item["name"] for item in json.loads(content).get("items", [])]
        return {key: self.get(key) for key in keys}

    def generation(self, key):
        """Of an object in the GCS emulator; 0 if there is none."""
        status, content = self._ask("GET", self._path(key).partition("?")[0])
        return int(json.loads(content)["generation"]) if status == 200 else 0

    def writes(self):
        """Every request that could change something, whatever came of it."""
        return [request for request in self.log if request.method in WRITES]

    def summary(self):
        """What was asked of the store, for a report."""
        deleted = sum(request.method == "DELETE" for request in self.log)
        total, lists = len(self.log), len(self.lists())
        return f"{total} requests: {len(self.writes())} writes, {deleted} deletions, {lists} lists"

    def lists(self):
        return [request for request in self.log if request.method == "GET" and not request.key.partition("/")[2]]


class _Server(ThreadingHTTPServer):
    allow_reuse_port = daemon_threads = True

    def handle_error(self, *_):
        pass  # a client that was killed


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def _key(self, url, query):
        """BUCKET/OBJECT of a request to either kind of store."""
        if self.proxy.kind == "s3":
            return urllib.parse.unquote(url.path).lstrip("/")
        found = re.fullmatch(r"(?:/upload|/download)?/storage/v1/b/([^/]*)/o(?:/(.*))?", url.path)
        if not found:
            return url.path
        return f"{found[1]}/{urllib.parse.unquote(found[2] or query.get('name', ''))}"

    def _unmet(self, query, key):
        """The status with which Google's store answers a request whose condition does not hold."""
        name = key.partition("/")[2]
        if "ifGenerationMatch" in query and self.proxy.generation(name) != int(query["ifGenerationMatch"]):
            return 412
        other = query.get("ifGenerationNotMatch")
        return 304 if other is not None and self.proxy.generation(name) == int(other) else None

    def _forward(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # its sender was killed
            return
        proxy, url = self.proxy, urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        key = self._key(url, query)
        named = {name.lower(): value for name, value in self.headers.items()}
        conditions = {n: v for n, v in (query | named).items() if n.startswith(("if-", "ifGeneration"))}
        fault = proxy.faults.pop(0) if proxy.faults else None
        if isinstance(fault, float):
            time.sleep(fault)
        refused = 503 if fault == "refuse" else proxy.before(self.command, key)
        if fault == "cut":
            return self.connection.close()
        with proxy.lock:  # one at a time: the emulator's conditions are looked at here
            if proxy.kind == "gs" and not refused:
                refused = self._unmet(query, key)
            status, content, headers = (refused, b"", {}) if refused else self._passed_on(body)
            proxy.log.append(Request(self.command, key, status, conditions))
            if proxy.kind == "gs" and query.get("alt") == "media" and status < 300:
                headers["x-goog-generation"] = str(proxy.generation(key.partition("/")[2]))
        if fault == "lose":
            return self.connection.close()
        self.send_response(status)
        for name, value in headers.items():
            if name != "content-length":
                self.send_header(name, value)
        length = headers.get("content-length", "0") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _passed_on(self, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.backend, timeout=120)
        left_out = ("connection", "accept-encoding", "transfer-encoding", "date", "server")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        connection.request(self.command, self.path, body=body or None, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        kept = {name.lower(): value for name, value in answer.getheaders() if name.lower() not in left_out}
        return answer.status, content, kept

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _forward


@functools.cache
def backend(kind):
    """The port of the one server of a kind that this process has; ImportError where its package is not installed."""
    if kind == "s3":
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        return moto.get_host_and_port()[1]
    from gcp_storage_emulator.server import create_server

    for name in ("api.object", "gcp_storage_emulator.storage", "gcp_storage_emulator.server"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True)
    server._api.daemon = True  # else the process would wait for this thread at its exit
    server.start()
    return port


@contextmanager
def served(kind):
    """A proxy in front of the server of this kind, and a new bucket in it."""
    proxy = Proxy(backend(kind), kind)
    proxy.make()
    yield proxy
    proxy.close()
