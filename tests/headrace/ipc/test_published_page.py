"""A page is read whole, while it is young."""

import time
from pathlib import Path

from headrace.ipc.published_page import PublishedPage


def test_page_is_absent_until_it_is_written(tmp_path: Path) -> None:
    assert PublishedPage(str(tmp_path), "page").read(60) is None


def test_page_is_replaced_as_a_whole(tmp_path: Path) -> None:
    writer, reader = (PublishedPage(str(tmp_path), "page") for _ in range(2))
    writer.write(b"longer")
    with (tmp_path / "page").open("rb") as old:
        writer.write(b"new")
        assert old.read() == b"longer"
    new = reader.read(60)
    assert new is not None and new.body == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_page_is_not_read_when_it_is_old(tmp_path: Path) -> None:
    PublishedPage(str(tmp_path), "page").write(b"text")
    read = PublishedPage(str(tmp_path), "page", lambda: time.time() + 50).read(60)
    assert read is not None and read.body == b"text"
    assert 49 < read.age_s <= 60
    assert PublishedPage(str(tmp_path), "page", lambda: time.time() + 70).read(60) is None


def test_page_stays_when_a_new_one_cannot_be_written(tmp_path: Path) -> None:
    page = PublishedPage(str(tmp_path), "page")
    page.write(b"old")
    (tmp_path / "page.new").symlink_to("/dev/full")
    page.write(b"new")
    old = page.read(60)
    assert old is not None and old.body == b"old"
