"""Objects in S3, on a real server, with what it and its network do wrong."""

from __future__ import annotations

import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_swap.errors import TierError
from kv_swap.tiers.record import PAGE_BYTES
from kv_swap.tiers.remote import s3
from kv_swap.tiers.remote.client import object_keys
from kv_swap.tiers.remote.sweep import sweep

from tests.support.s3_server import BUCKET, KEY, SECRET, S3Server, require_s3
from tests.support.tier_bed import ALIGNED, S3Bed, named
from tests.support.waiting import wait_until

URL = f"s3://{BUCKET}/prefix"
NAMES = named(8)
RECORD_BYTES = PAGE_BYTES + ALIGNED

DENIED = f"""<?xml version="1.0"?><Error><Code>SignatureDoesNotMatch</Code>
<AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>AWS4 {KEY}</StringToSign></Error>"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    require_s3()
    with S3Server(tmp_path / "served") as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def bed(server: S3Server) -> Iterator[S3Bed]:
    with S3Bed(URL) as bed:
        yield bed


def file_of(server: S3Server, bed: S3Bed, name: bytes) -> Path:
    """Return the file in which the server keeps the object of a block."""
    (key,) = object_keys(bed.tier.file_id, [name])
    return server.folder / BUCKET / "prefix" / key


def test_a_server_that_is_gone_fails_jobs_until_it_is_back(server, bed):
    bed.put(NAMES)
    server.kill()
    for done in (bed.put(NAMES), bed.get(NAMES)):
        assert (done.failed, done.mismatches) == (tuple(NAMES), 0)
        assert f"objects at {URL}: GenericError" in str(done.error)
    server.start()
    assert bed.get(NAMES).failed == ()
    assert bed.right(NAMES) == list(NAMES)


def test_a_server_that_hangs_is_given_up(server, monkeypatch):
    monkeypatch.setattr(s3, "REQUEST_SECONDS", 1)
    with S3Bed(URL) as bed:
        bed.put(NAMES)
        server.hold()
        began = time.monotonic()
        done = bed.get(NAMES)
        assert time.monotonic() - began < 30
        assert done.failed == tuple(NAMES)
        assert done.error is not None
        server.go_on()
        assert bed.get(NAMES).failed == ()


def test_wrong_credentials_are_an_error_without_them(server, monkeypatch, caplog):
    wrong = "wrong-secret-of-a-user"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    with S3Bed(URL, max_bytes=1 << 20) as bed:
        errors = [bed.put(NAMES).error, bed.get(NAMES).error]
        for call in (
            bed.client.connect,
            lambda: bed.client.remove(["a"]),
            lambda: sweep(bed.client, 1),
        ):
            with pytest.raises(TierError) as caught:
                call()
            assert caught.value.__cause__ is None
            assert caught.value.__suppress_context__, "nor does a traceback tell"
            errors.append(caught.value)
    for error in errors:
        assert "403" in str(error)
        for part in (KEY, SECRET, wrong):
            assert part not in f"{error}{caplog.text}"


@pytest.fixture(params=[(503, ""), (403, DENIED)], ids=["503", "403"])
def refusing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, list[str]]]:
    """A server that gives all requests one answer; its status, and the requests."""
    require_s3()
    asked: list[str] = []
    status, body = request.param

    class Refusing(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.command)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode())

        do_GET = do_HEAD = do_PUT = do_POST = answer  # noqa: N815 - names of http.server

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{serving.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield status, asked
        serving.shutdown()


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not(refusing):
    """What AWS answers to a wrong signature has the access key in it."""
    status, asked = refusing
    with S3Bed(URL) as bed:
        done = bed.get({0: NAMES[0]})
    assert done.failed == (0,)
    assert str(status) in str(done.error)
    assert asked.count("GET") == 1 + (s3.RETRIES if status == 503 else 0)
    assert KEY not in str(done.error)


def test_the_oldest_go_and_objects_of_others_stay(server):
    names = named(32)
    with S3Bed(URL, 32) as bed:
        bed.put(names)
        for slot, name in names.items():
            os.utime(file_of(server, bed, name), (10_000 * (slot + 1),) * 2)
        other = server.folder / BUCKET / "prefix" / "kv-offload" / "notes"
        other.write_bytes(bytes(RECORD_BYTES))
        os.utime(other, (0, 0))
        # The server keeps for a moment what it knows.
        wait_until(lambda: max(entry.used for entry in bed.client.entries()) <= 330_000)
        assert sweep(bed.client, 16 * RECORD_BYTES) == 17 * RECORD_BYTES
        left = [slot for slot, name in names.items() if file_of(server, bed, name).exists()]
        assert left == list(names)[17:]
        assert other.exists()
        done = bed.get(names)
        assert (len(done.failed), done.mismatches, done.error) == (17, 0, None)


def test_a_listing_that_lags_costs_nothing_that_was_written_since(server, monkeypatch):
    """It has objects that are gone, and lacks newer ones."""
    old, new = named(16, "old"), named(16, "new")
    with S3Bed(URL, 16) as bed:
        bed.put(old)
        lagging = list(bed.client.entries())
        assert len(lagging) == 16
        bed.client.remove([entry.key for entry in lagging[:4]])
        bed.put(new)
        with monkeypatch.context() as patch:
            patch.setattr(bed.client, "entries", lambda: iter(lagging))
            assert sweep(bed.client, 8 * RECORD_BYTES) == 9 * RECORD_BYTES
        assert bed.get(new).failed == ()
        wait_until(lambda: sweep(bed.client, 8 * RECORD_BYTES) == 0, "the bound is not kept")


def test_who_writes_keeps_the_bound(server):
    limit = 16 * RECORD_BYTES
    with S3Bed(URL, 16, max_bytes=limit) as bed:
        for number in range(3):
            assert bed.put(named(16, f"round {number}")).failed == ()
        entries = bed.client.entries
        wait_until(lambda: sum(entry.nbytes for entry in entries()) <= limit, "nobody sweeps")


def test_without_a_bound_nothing_is_swept(server):
    with S3Bed(URL, max_bytes=0) as bed:
        bed.put(NAMES)
        assert bed.client._sweeper is None
        assert bed.get(NAMES).failed == ()
