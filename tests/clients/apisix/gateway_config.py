"""The requests that Apache APISIX makes of etcd: many configuration paths, each listed once and then watched by long polls.

It owns the record of what was seen; it must not know Keyward, and it does not judge: tests/etcd does. The contract of the lines is in
README.md, which also says where each habit comes from. Nothing here is cleverer than the library is: it logs in again by the clock
only, it takes an event's line where a chunk ends, and it opens a watch again where the time limit of its socket is over.
"""

import argparse
import asyncio
import base64
import json
import pathlib
import random
import signal
import sys
import time
import urllib.parse

STARTED = time.monotonic()
# The library logs in again when its token is this old, in seconds, and somewhat older.
REFRESH, REFRESH_SPREAD = 180, 60
# An endpoint that failed is left alone for this long, in seconds.
FAIL_TIMEOUT = 10
# What APISIX waits after a failed round of a path, in seconds.
PAUSE = 0.5


def emit(kind, **fields):
    """One line at once, so that a reader sees it even if the process dies next."""
    sys.stdout.write(json.dumps({"t": int((time.monotonic() - STARTED) * 1000), "kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def encode(text):
    return base64.b64encode(text.encode()).decode()


def decode(text):
    return base64.b64decode(text or "").decode()


def prefix_end(key):
    return key[:-1] + chr(ord(key[-1]) + 1)


class Failed(Exception):
    """What the library returns as `err`."""


class Connection:
    """One connection over HTTP/1.1. Each read or write has the time limit of the socket, and there is none over all."""

    def __init__(self, reader, writer, limit):
        self.reader, self.writer, self.limit = reader, writer, limit

    @staticmethod
    async def open(endpoint, limit):
        url = urllib.parse.urlsplit(endpoint)
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(url.hostname, url.port, limit=1 << 24), limit)
        except asyncio.TimeoutError:
            raise Failed("timeout") from None
        except OSError as error:
            raise Failed(f"connect: {error.strerror}") from error
        return Connection(reader, writer, limit)

    async def wait(self, step):
        try:
            return await asyncio.wait_for(step, self.limit)
        except asyncio.TimeoutError:
            raise Failed("timeout") from None
        except (OSError, EOFError) as error:
            raise Failed(f"closed: {type(error).__name__}") from error

    async def request(self, method, path, host, body, token):
        head = [f"{method} {path} HTTP/1.1", f"Host: {host}", "User-Agent: lua-resty-http"]
        if token is not None:
            head.append(f"Authorization: {token}")
        if body is not None:
            head.append(f"Content-Length: {len(body)}")
        self.writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + (body or b""))
        await self.wait(self.writer.drain())
        status = int((await self.line()).split(" ")[1])
        headers = {}
        while line := await self.line():
            name, value = line.split(":", 1)
            headers[name.strip().lower()] = value.strip()
        return status, headers

    async def line(self):
        line = await self.wait(self.reader.readline())
        if not line.endswith(b"\n"):
            raise Failed("closed")
        return line.decode().rstrip("\r\n")

    async def chunk(self):
        """The next chunk of a body; empty at its end."""
        size = int((await self.line()).split(";")[0], 16)
        chunk = await self.wait(self.reader.readexactly(size))
        await self.line()
        return chunk

    async def body(self, headers):
        if headers.get("transfer-encoding") == "chunked":
            whole = b""
            while chunk := await self.chunk():
                whole += chunk
            return whole
        return await self.wait(self.reader.readexactly(int(headers.get("content-length", 0))))

    def close(self):
        self.writer.close()


class Library:
    """One client of the library, as a worker has it: endpoints in turn, one token, connections kept for the next request."""

    def __init__(self, asked, password):
        self.endpoints, self.turn = asked.hosts, random.randrange(100)
        self.unhealthy = {}
        self.user, self.password = asked.user, password
        self.limit = asked.request_timeout
        self.token, self.born, self.login = None, 0, asyncio.Lock()
        self.idle = {}

    def endpoint(self):
        for _ in self.endpoints:
            self.turn += 1
            one = self.endpoints[self.turn % len(self.endpoints)]
            if self.unhealthy.get(one, 0) < time.monotonic():
                return one
        raise Failed("has no healthy etcd endpoint available")

    def report_failure(self, endpoint):
        self.unhealthy[endpoint] = time.monotonic() + FAIL_TIMEOUT

    async def authorization(self):
        if self.user is None:
            return None
        async with self.login:
            if self.token is None or time.monotonic() - self.born >= REFRESH + random.randrange(REFRESH_SPREAD + 1):
                body = {"name": self.user, "password": self.password}
                answer = await self.ask("POST", "/v3/auth/authenticate", body, None, keep=False)
                if "token" not in answer:
                    raise Failed("authenticate refresh token fail")
                self.token, self.born = answer["token"], time.monotonic()
                emit("authenticated")
        return self.token

    async def call(self, path, body):
        return await self.ask("POST", path, body, await self.authorization())

    async def ask(self, method, path, body, token, keep=True):
        endpoint = self.endpoint()
        text = json.dumps(body).encode() if body is not None else None
        kept = self.idle.setdefault(endpoint, [])
        connection = kept.pop() if kept and keep else None
        try:
            if connection is None:
                connection = await Connection.open(endpoint, self.limit)
            status, headers = await connection.request(method, path, endpoint.split("//")[1], text, token)
            whole = await connection.body(headers)
        except Failed:
            if connection is not None:
                connection.close()
            self.report_failure(endpoint)
            raise
        if keep and headers.get("connection") != "close":
            kept.append(connection)
        else:
            connection.close()
        if status >= 500:
            self.report_failure(endpoint)
            raise Failed(f"invalid response code: {status}")
        answer = json.loads(whole)
        if status != 200:
            raise Failed(f"response code: {status} {json.dumps(answer)}")
        return answer

    async def watch(self, key, revision, limit):
        """Opens the long poll of one path; the answers come by `read_watch`."""
        token = await self.authorization()
        body = {"create_request": {"key": encode(key), "range_end": encode(prefix_end(key)), "start_revision": revision}}
        endpoint = self.endpoint()
        try:
            connection = await Connection.open(endpoint, limit)
        except Failed:
            self.report_failure(endpoint)
            raise
        try:
            text = json.dumps(body).encode()
            status, _ = await connection.request("POST", "/v3/watch", endpoint.split("//")[1], text, token)
        except Failed:
            connection.close()
            raise
        if status >= 300:
            connection.close()
            raise Failed(f"failed to watch data, response code: {status}")
        return endpoint, connection


async def read_watch(library, endpoint, connection):
    """The answers of one round: chunks up to one that ends with a line's end; none at the body's end."""
    body = b""
    while chunk := await connection.chunk():
        body += chunk
        if chunk.endswith(b"\n"):
            break
    if not body:
        return None
    answers = [json.loads(line) for line in body.split(b"\n") if line]
    for answer in answers:
        if error := answer.get("error"):
            if error.get("http_code", 500) >= 500:
                library.report_failure(endpoint)
            raise Failed(f"error in the stream: {json.dumps(error)}")
    return answers


class Path:
    """One configuration path: listed, then watched from the revision after the last one seen."""

    def __init__(self, number, library, asked):
        self.number, self.library, self.asked = number, library, asked
        self.key = f"{asked.prefix}{number:04}/"
        self.revision = None
        self.opened = asyncio.Event()

    async def run(self):
        while True:
            try:
                await self.round()
            except Failed as error:
                emit("failed", path=self.number, why=str(error))
                if str(error) != "timeout":
                    await asyncio.sleep(PAUSE)

    async def round(self):
        if self.revision is None:
            body = {"key": encode(self.key), "range_end": encode(prefix_end(self.key)), "limit": 0, "revision": 0, "sort_order": 0,
                    "sort_target": 0, "serializable": False, "keys_only": False, "count_only": False, "min_mod_revision": 0,
                    "max_mod_revision": 0, "min_create_revision": 0, "max_create_revision": 0}
            answer = await self.library.call("/v3/kv/range", body)
            self.revision = int(answer["header"]["revision"])
            emit("listed", path=self.number, revision=self.revision, keys=len(answer.get("kvs", [])))
        endpoint, connection = await self.library.watch(self.key, self.revision + 1, self.asked.watch_timeout)
        try:
            while answers := await read_watch(self.library, endpoint, connection):
                for answer in answers:
                    self.take(answer)
            emit("ended", path=self.number)
        finally:
            connection.close()

    def take(self, answer):
        result = answer.get("result", {})
        if result.get("created"):
            self.opened.set()
        if result.get("canceled"):
            raise Failed(f"canceled: {result.get('cancel_reason')}")
        for event in result.get("events", []):
            kv = event["kv"]
            revision = int(kv["mod_revision"])
            emit("event", path=self.number, type=event.get("type", "PUT"), key=decode(kv["key"]), value=decode(kv.get("value")),
                 revision=revision)
            self.revision = max(self.revision, revision)


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", required=True, type=lambda text: text.split(","))
    parser.add_argument("--user")
    parser.add_argument("--password-file", type=pathlib.Path)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--paths", type=int, required=True)
    parser.add_argument("--paths-per-client", type=int, default=10)
    parser.add_argument("--request-timeout", type=float, default=30)
    parser.add_argument("--watch-timeout", type=float, default=50)
    asked = parser.parse_args()
    password = asked.password_file.read_text().strip() if asked.password_file else None
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    libraries = [Library(asked, password) for _ in range(0, asked.paths, asked.paths_per_client)]
    paths = [Path(i, libraries[i // asked.paths_per_client], asked) for i in range(asked.paths)]
    emit("start", version=(await libraries[0].ask("GET", "/version", None, None))["etcdserver"])
    tasks = [asyncio.create_task(path.run()) for path in paths]
    for path in paths:
        await path.opened.wait()
    emit("ready")
    waiting = asyncio.create_task(ended.wait())
    # A path whose task ended did so by a fault of this program.
    done, _ = await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
    for task in done - {waiting}:
        task.result()
    emit("end")


if __name__ == "__main__":
    asyncio.run(main())
