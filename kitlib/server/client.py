"""HTTP to a server that may misbehave: whatever goes wrong is one sentence, in bounded time and memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3

from ..findings import KitError
from ..logs import redact

MAX_BODY = 64 << 20  # bytes of one answer, or of one event of a stream
TEXTS = {
    "refused": "refused the connection; check that it runs and that the address is right",
    "time-out": "did not answer within {s:g} s; it hangs, or the time-out is too short",
    "cut": "ended in the middle of the answer; see the server's log",
    "huge": f"sent more than {MAX_BODY >> 20} MB at once; is this an SGLang server?",
    "401": "wants an API key, or another one (status {kind}); give it as api_key",
}
TEXTS["403"] = TEXTS["401"]


class Failed(KitError):
    """A request that got no usable answer; `kind` is refused, time-out, cut, huge, or the HTTP status."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Client:
    """One server by its URL. The API key goes into requests to that URL and nowhere else."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 120.0) -> None:
        try:
            parts = urlsplit(url if isinstance(url, str) else "")
        except ValueError:
            parts = urlsplit("")
        api_key = api_key.strip()
        if not (api_key.isascii() and api_key.isprintable()):
            raise KitError("The API key holds characters that no HTTP header can carry; copy it again.")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise KitError("The server's URL must look like http://host:port, without a user name or key in it.")
        self.url, self.timeout_s, self._auth = (
            f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
            timeout_s,
            _Key(api_key),
        )
        self._local = parts.hostname in ("localhost", "127.0.0.1", "::1")

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def get(self, path: str) -> Any:
        """The JSON object that this path answers."""
        return self._json(path, b"".join(self._pieces("GET", path, None, self.timeout_s)))

    def text(self, path: str) -> str:
        """The text that this path answers."""
        return b"".join(self._pieces("GET", path, None, self.timeout_s)).decode("utf-8", "replace")

    def post(self, path: str, body: Any) -> Any:
        """The JSON object that this path answers to a JSON body."""
        return self._json(path, b"".join(self._pieces("POST", path, body, self.timeout_s)))

    def status(self, path: str, timeout_s: float) -> str:
        """What a poll sees: "200", another status, "refused", "time-out", …"""
        try:
            for _ in self._pieces("GET", path, None, timeout_s):
                pass
            return "200"
        except Failed as failed:
            return failed.kind

    def stream(self, path: str, body: Any) -> Iterator[dict]:
        """The JSON objects of a server-sent event stream, as they arrive; it has to end with [DONE]."""
        rest: list[bytes] = []
        for piece in self._pieces("POST", path, body, self.timeout_s, events=True):
            *lines, end = piece.split(b"\n")
            rest, lines = ([end], [b"".join([*rest, lines[0]]), *lines[1:]]) if lines else ([*rest, end], [])
            for line in lines:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data:"):
                    yield self._json(path, line[5:])
        raise Failed("cut", f"{self.url}{path} {TEXTS['cut']}.")

    def _json(self, path: str, data: bytes) -> dict:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise Failed("json", f"{self.url}{path} answered what is not JSON; is this an SGLang server?") from None
        if not isinstance(value, dict):
            raise Failed("json", f"{self.url}{path} answered a {type(value).__name__}, not an object; is this SGLang?")
        if isinstance(value.get("error"), dict):
            raise Failed("error", f"{self.url}{path} refused: {self._plain(str(value['error'].get('message', '')))}.")
        return value

    def _pieces(self, method: str, path: str, body: Any, limit_s: float, events: bool = False) -> Iterator[bytes]:
        """The body of a 200 as it arrives; Failed when `limit_s` are over, be it in silence or in drops."""
        end, size, kind, said = time.monotonic() + limit_s, 0, "", "nothing"
        try:
            with requests.Session() as session:
                session.trust_env = not self._local  # no proxy on the way to this machine
                with session.request(
                    method, self.url + path, json=body, stream=True, timeout=limit_s, allow_redirects=False,
                    auth=self._auth, headers={"Accept-Encoding": "identity"},
                ) as answer:  # fmt: skip
                    for piece in iter(lambda: answer.raw.read1(1 << 16, decode_content=False), b""):
                        if answer.status_code != 200:
                            said = self._plain(piece.decode("utf-8", "replace"))
                            break
                        size = len(piece) + (0 if events and b"\n" in piece else size)
                        if kind := "huge" if size > MAX_BODY else "time-out" if time.monotonic() > end else "":
                            break
                        yield piece
                    kind = kind or ("" if answer.status_code == 200 else str(answer.status_code))
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            text = f"{type(error).__name__} {error}".lower()
            kind = "time-out" if "timed out" in text or "timeout" in text else "cut"
            kind = "refused" if "newconnection" in text or "refused" in text or "nameresolution" in text else kind
        if kind:
            text = TEXTS.get(kind, "answered with status {kind}: {said}").format(s=limit_s, kind=kind, said=said)
            raise Failed(kind, f"{self.url}{path} {text}" + "." * (text[-1] not in ".?"))

    def _plain(self, text: str) -> str:
        """What a server said, in one short line, without the key."""
        text = text.replace(self._auth.key, "…") if self._auth.key else text
        return redact(" ".join(text.split()))[:200]


class _Key(requests.auth.AuthBase):
    """The bearer header; it also keeps requests from looking for another key in ~/.netrc."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __repr__(self) -> str:
        return "…"

    def __call__(self, request: Any) -> Any:
        if self.key:
            request.headers["Authorization"] = f"Bearer {self.key}"
        return request
