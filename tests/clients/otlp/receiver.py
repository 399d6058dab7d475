"""A receiver of OTLP logs over HTTPS, which decodes requests by OpenTelemetry's published types.

    receiver --cert FILE --key FILE --authorization TEXT [--unavailable N]

Prints JSON lines: `ready` with the port; `unavailable` for each of the first N requests, which get 503; `refused` with the reason for a
request that is not as the specification says; `record` for each log record. It runs until it is killed.
"""

import argparse
import http.server
import json
import ssl
import threading

from google.protobuf.json_format import MessageToDict, ParseDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse

PRINTING = threading.Lock()


def say(kind, **fields):
    with PRINTING:
        print(json.dumps({"kind": kind, **fields}), flush=True)


def fault(request, headers, path, authorization):
    """The reason why a request is not as it should be."""
    if path != "/v1/logs":
        return f"path {path}"
    if headers.get_all("content-type") != ["application/x-protobuf"]:
        return f"content-type {headers.get_all('content-type')}"
    if headers.get_all("authorization") != [authorization]:
        return "authorization"
    # Fields unknown to the published types do not survive.
    if ParseDict(MessageToDict(request), ExportLogsServiceRequest()) != request:
        return "fields that the published types do not know"
    return None


def attributes(pairs):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def records(request):
    for resource in request.resource_logs:
        for scope in resource.scope_logs:
            for record in scope.log_records:
                yield {
                    "resource": attributes(resource.resource.attributes),
                    "scope": scope.scope.name,
                    "time": record.time_unix_nano,
                    "observed": record.observed_time_unix_nano,
                    "severity": record.severity_number,
                    "event": record.event_name,
                    "attributes": attributes(record.attributes),
                    "body": record.body.string_value,
                }


class Receiver(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        with PRINTING:
            unavailable = self.server.unavailable > 0
            self.server.unavailable -= 1
        if unavailable:
            say("unavailable")
            return self.answer(503, b"")
        request = ExportLogsServiceRequest.FromString(body)
        reason = fault(request, self.headers, self.path, self.server.authorization)
        if reason:
            say("refused", reason=reason)
            return self.answer(400, b"")
        for record in records(request):
            say("record", **record)
        return self.answer(200, ExportLogsServiceResponse().SerializeToString())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cert", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--authorization", required=True)
    parser.add_argument("--unavailable", type=int, default=0)
    options = parser.parse_args()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.daemon_threads = True
    server.unavailable, server.authorization = options.unavailable, options.authorization
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(options.cert, options.key)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    say("ready", port=server.server_address[1])
    server.serve_forever()


if __name__ == "__main__":
    main()
