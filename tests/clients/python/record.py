"""The record, JSON lines on stdout as ../README.md has them, and the connection as an ordinary program makes it. Secrets never come
into the record."""

import json
import sys
import threading
import time

import etcd3
import grpc

STARTED = time.monotonic()

stdout = threading.Lock()


def emit(kind, **fields):
    """Prints one line at once, so that a reader sees it even if the process dies next."""
    line = json.dumps({"t": int((time.monotonic() - STARTED) * 1000), "kind": kind, **fields})
    with stdout:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def described(error):
    """Code and text of an error as an application gets them: the library's own exceptions have neither."""
    if isinstance(error, grpc.RpcError):
        words = error.code().name.split("_")
        name = {"OK": "OK", "CANCELLED": "Canceled"}.get(error.code().name, "".join(map(str.capitalize, words)))
        return {"code": name, "message": error.details()}
    return {"code": type(error).__name__, "message": str(error)}


def connect(options):
    """The library takes one endpoint: HOST:PORT, or unix:/PATH, which is gRPC's name of it."""
    host, port = options.endpoints.split(",")[0].rsplit(":", 1)
    port = int(port) if port.isdigit() else port
    settings = {}
    if options.user:
        with open(options.password_file, encoding="utf-8") as file:
            settings = {"user": options.user, "password": file.read().rstrip("\r\n")}
    if options.gzip:
        settings["grpc_options"] = [("grpc.default_compression_algorithm", grpc.Compression.Gzip.value)]
    return etcd3.client(host=host, port=port, ca_cert=options.cacert or None, **settings)
