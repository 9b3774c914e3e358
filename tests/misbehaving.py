"""A real HTTP server in a thread that misbehaves as it is told; and scripts that stand in for an engine."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INFO = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 4, "speculative_num_draft_tokens": 5}
INFO |= {"version": "0.5.20", "internal_states": [{"avg_spec_accept_length": 1.5}]}


def answer(ids: list[int], histogram: list[int]) -> dict:
    """A final /generate chunk of 0.5.20."""
    v, a = sum(histogram), sum(k * n for k, n in enumerate(histogram))
    meta = {"completion_tokens": len(ids), "spec_verify_ct": v, "spec_num_correct_drafts": a}
    return {"text": "x" * len(ids), "output_ids": ids, "meta_info": meta | {"spec_correct_drafts_histogram": histogram}}


def sse(*chunks: dict) -> bytes:
    return b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks) + b"data: [DONE]\n\n"


@contextmanager
def serving(handle, key: str = ""):
    """`handle(request, path, body)` answers (status, bytes), None for "already done"; yields the URL and the log."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            seen.append((self.path, body, dict(self.headers)))
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                result = (401, b'{"error": "wrong key"}')
            else:
                result = handle(self, self.path, body)
            if result is not None:
                status, data = result
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = reply

        def log_message(self, *_) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads, block_on_close = True, False

        def handle_error(self, *_) -> None:  # a client that gave up
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def healthy(bad=None, after: int = 0):
    """A handler that works; `bad(request, body)` answers /generate from request number `after` on."""
    asked = []

    def handle(request, path, body):
        if path.startswith(("/generate", "/v1/chat")):
            asked.append(path)
            if bad and len(asked) > after:
                return bad(request, body)
        if path == "/generate":
            ids = [body["input_ids"][0] + k for k in range(8)]
            return 200, sse(answer(ids[:1], [0, 0, 0, 0, 0]) | {"meta_info": {}}, answer(ids, [1, 1, 1, 0, 0]))
        if path == "/v1/chat/completions":
            meta = answer([0] * 8, [1, 1, 1, 0, 0])["meta_info"]
            return 200, json.dumps({"choices": [{"message": {"content": "Paris."}, "meta_info": meta}]}).encode()
        return 200, json.dumps(INFO if path == "/server_info" else {}).encode()

    return handle


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def hang(_request, _body):
    time.sleep(30)


def cut(request, _body):
    """Half a stream, then the connection is gone."""
    request.send_response(200)
    request.send_header("Content-Length", "100000")
    request.end_headers()
    request.wfile.write(b"data: " + json.dumps(answer([1], [0] * 5)).encode() + b"\n\n")
    request.wfile.flush()
    request.connection.shutdown(socket.SHUT_RDWR)


def endless(request, _body):
    """A body without an end."""
    request.send_response(200)
    request.send_header("Content-Length", str(1 << 40))
    request.end_headers()
    while True:
        request.wfile.write(b"x" * (1 << 20))


def drip(request, _body):
    """One byte at a time, so that no single read times out."""
    request.send_response(200)
    request.send_header("Content-Length", "100000")
    request.end_headers()
    for _ in range(300):
        request.wfile.write(b" ")
        request.wfile.flush()
        time.sleep(0.1)


ENGINE = '''
"""Stands in for an engine: children in the same group and in a session of their own, then a health endpoint."""
import argparse, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--pids", default="")
parser.add_argument("--log", default="")
args, _ = parser.parse_known_args()
if args.log:
    sys.stdout.write(open(args.log).read())
    sys.exit(1)
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", stubborn]),
            subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)]
orphan = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', %r], stdout=-3); print(p.pid)" % stubborn
born = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True)
if args.pids:
    with open(args.pids + ".new", "w") as out:
        out.write(" ".join(map(str, [os.getpid(), *(c.pid for c in children), int(born.stdout)])))
    os.replace(args.pids + ".new", args.pids)

class Handler(BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Handler.count += 1
        self.send_response(503 if Handler.count < 3 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        if Handler.count == 3:
            print(time.strftime("[%Y-%m-%d %H:%M:%S]"), "The server is fired up and ready to roll!", flush=True)

time.sleep(0.3)
HTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
'''
