"""Atomic writes of files."""

import os

import pytest

from rsa_hf.utils.files import atomic_write, write_text


def test_a_file_is_replaced_only_when_the_block_succeeds(tmp_path):
    path = tmp_path / "new" / "a.json"
    with atomic_write(path) as temporary:
        temporary.write_text("old")
        assert not path.exists()
    with pytest.raises(KeyError), atomic_write(path) as temporary:  # noqa: PT012
        temporary.write_text("half of the n")
        raise KeyError
    assert path.read_text() == "old"
    write_text(path, "né\n")
    assert path.read_bytes() == "né\n".encode()
    assert [each.name for each in path.parent.iterdir()] == ["a.json"]


def test_a_link_stays_one_and_what_is_no_file_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
