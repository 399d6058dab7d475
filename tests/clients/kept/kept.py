"""Requests over kept connections of http.client, each answered before the next, until SIGTERM. See README.md for the record."""

import http.client
import json
import signal
import sys
import threading

# Between two tries to connect, in seconds.
PAUSE = 0.02
HEADERS = {"Content-Type": "application/json"}


class Count:
    def __init__(self):
        self.lock = threading.Lock()
        self.fields = {"answered": 0, "closes": 0, "refused": 0, "wrong": 0, "unanswered": 0}
        self.texts = []

    def add(self, field, text=None):
        with self.lock:
            self.fields[field] += 1
            if text:
                self.texts.append(text)


def requests(host, port, path, body, count, ended):
    connection = http.client.HTTPConnection(host, port)
    while not ended.is_set():
        if connection.sock is None:
            try:
                connection.connect()
            except OSError:
                # Nobody listens: nothing was sent.
                count.add("refused")
                ended.wait(PAUSE)
                continue
        try:
            connection.request("POST", path, body, HEADERS)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            count.add("unanswered", type(error).__name__)
            connection.close()
            continue
        count.add("answered" if answer.status == 200 else "wrong", None if answer.status == 200 else str(answer.status))
        if answer.will_close:
            count.add("closes")


def main():
    address, path, body, connections = sys.argv[1:]
    host, port = address.rsplit(":", 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    count, ended = Count(), threading.Event()
    workers = [threading.Thread(target=requests, args=(host, int(port), path, body, count, ended)) for _ in range(int(connections))]
    for worker in workers:
        worker.start()
    print(json.dumps({"kind": "ready"}), flush=True)
    signal.sigwait({signal.SIGTERM})
    ended.set()
    for worker in workers:
        worker.join()
    print(json.dumps({"kind": "summary", "texts": count.texts[:10], **count.fields}), flush=True)


if __name__ == "__main__":
    main()
