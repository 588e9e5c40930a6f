"""Atomic writes of files."""

import pytest

from rsa_hf.utils.files import StorageError, atomic_write, write_text


def test_a_file_is_replaced_only_when_the_block_succeeds(tmp_path):
    path = tmp_path / "a.json"
    with atomic_write(path) as temporary:
        temporary.write_text("old")
        assert not path.exists()
    with pytest.raises(KeyError), atomic_write(path) as temporary:  # noqa: PT012
        temporary.write_text("half of the n")
        raise KeyError
    assert path.read_text() == "old"
    write_text(path, "né\n")
    assert path.read_bytes() == "né\n".encode()
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_is_made_and_a_file_in_its_place_is_a_storage_error(tmp_path):
    write_text(tmp_path / "new" / "a", "text")
    assert (tmp_path / "new" / "a").read_text() == "text"
    with pytest.raises(StorageError, match="cannot write to .*/a: File exists"):
        write_text(tmp_path / "new" / "a" / "b", "text")
