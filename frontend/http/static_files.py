"""Files for browsers, from memory: the page at `/`, the API reference at `/docs`, their assets.

`make ui` builds `frontend/ui/dist`, compressed variants included, so a frontend computes nothing.
The files need no API key, and hold nothing of the server. The pages ask the API, with the key.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.frontend.http.request import HttpExchange
from headrace.frontend.http.request_head import Headers
from headrace.routes import DOCS, UI

DIST = Path(__file__).parents[1] / "ui" / "dist"
UI_FOLDER = "/ui/"
PAGES = {"index.html": UI, "docs.html": DOCS}  # other files are at their own paths
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
IDENTITY = b"identity"
SUFFIXES = {b"br": ".br", b"gzip": ".gz", IDENTITY: ""}  # by content coding, the best first
ANY = b"*"
HASHED = re.compile(r".*-[0-9A-Z]{8}")  # names with a hash of the content
IMMUTABLE = b"public, max-age=31536000, immutable"  # of these
NO_CACHE = b"no-cache"  # asked for again each time, by ETag
# Nothing comes from other hosts, and no text becomes a program. Images are those a user adds.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFETY: Headers = (
    (b"content-security-policy", POLICY),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


class Variant(NamedTuple):
    """A file in one content coding."""

    etag: bytes
    headers: Headers  # of a 200
    unchanged: Headers  # of a 304
    body: bytes


class StaticFile:
    """A file in each content coding that makes it shorter, and in none.

    Attributes:
        variants: by content coding, the best first; `identity` is among them.
    """

    def __init__(self, variants: Mapping[bytes, Variant]) -> None:
        self.variants = variants

    def respond(self, request: HttpExchange) -> None:
        """Answer a GET or a HEAD: with 304 where the client has the file."""
        fields = dict(request.headers)
        variant = self.variants[self._coding_for(fields.get(b"accept-encoding", b""))]
        if names(fields.get(b"if-none-match", b""), variant.etag):
            request.begin(304, variant.unchanged, len(variant.body))
            request.end()
        else:
            request.respond(200, variant.headers, variant.body)

    def _coding_for(self, accepted: bytes) -> bytes:
        codings = accepted_in(accepted)
        return next((coding for coding in self.variants if coding in codings), IDENTITY)


class StaticFiles:
    """The files by path."""

    def __init__(self, files: Mapping[str, StaticFile]) -> None:
        self._files = files

    @classmethod
    def read(cls, has_ui: bool = True, folder: Path = DIST) -> "StaticFiles":
        """Read the files below a folder; without `has_ui`, only those of the API reference."""
        found = {path: file for path, file in read_files(folder)}
        return cls(found if has_ui else {p: f for p, f in found.items() if not is_of_ui(p)})

    @property
    def paths(self) -> set[str]:
        """The paths that have a file."""
        return set(self._files)

    def at(self, path: str) -> StaticFile:
        """Return the file at a path."""
        return self._files[path]

    def find(self, request: HttpExchange) -> StaticFile | None:
        """Return the file at a request's path, or None. `/` has one for clients that take HTML."""
        file = self._files.get(request.path)
        if file is None or request.path != UI:
            return file
        return file if takes_html(dict(request.headers).get(b"accept", ANY)) else None


def read_files(folder: Path) -> Iterator[tuple[str, StaticFile]]:
    """Yield the files below a folder, without their compressed variants, by path of the URL."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in TYPES:
            name = path.relative_to(folder).as_posix()
            yield PAGES.get(name, f"/{name}"), StaticFile(dict(variants_of(path)))


def variants_of(path: Path) -> Iterator[tuple[bytes, Variant]]:
    """Yield the variants of a file by content coding."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16].encode()
    is_hashed = HASHED.fullmatch(path.stem)
    for coding, suffix in SUFFIXES.items():
        variant = path.with_name(path.name + suffix)
        if not variant.exists():
            continue
        body, etag = variant.read_bytes(), b'"%b-%b"' % (digest, coding)
        unchanged = (
            (b"etag", etag),
            (b"cache-control", IMMUTABLE if is_hashed else NO_CACHE),
            (b"vary", b"accept, accept-encoding"),
            *SAFETY,
        )
        encoding = () if coding == IDENTITY else ((b"content-encoding", coding),)
        headers = ((b"content-type", TYPES[path.suffix]), *encoding, *unchanged)
        yield coding, Variant(etag, headers, unchanged, body)


def is_of_ui(path: str) -> bool:
    """Whether a path is of the page at `/` or of what it alone loads."""
    return path == UI or path.startswith(UI_FOLDER)


def takes_html(accepted: bytes) -> bool:
    """Whether an Accept header has HTML, or any type."""
    return b"text/html" in accepted or b"*/*" in accepted or accepted == ANY


def accepted_in(accepted: bytes) -> set[bytes]:
    """Return the content codings of an Accept-Encoding header, without those of weight 0."""
    found = set()
    for item in accepted.lower().split(b","):
        coding, _, weight = item.partition(b";")
        if weight.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000"):
            found.add(coding.strip())
    return found


def names(condition: bytes, etag: bytes) -> bool:
    """Whether an If-None-Match header has an entity tag, by weak comparison (RFC 9110, 8.8.3.2)."""
    given = {tag.strip().removeprefix(b"W/") for tag in condition.split(b",")}
    return etag in given or given == {ANY}
