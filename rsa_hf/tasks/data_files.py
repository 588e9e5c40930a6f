"""What both tasks read: plain or compressed files, tables of any kind, and the splits of a data set on the Hub."""

import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import datasets
from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile
from transformers.hf_argparser import HfArg

from rsa_hf.utils.text import brief

SPLITS = ("train", "validation", "test")
MOST_NAMED = 10  # bad rows in one message

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
_COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ": lzma.open}  # how compressed files begin
_BOM = b"\xef\xbb\xbf"
# How archives begin; the tar header has its mark at byte 257.
_ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!", b"BZh", b"\x28\xb5\x2f\xfd", b"PAR1")

Row = TypeVar("Row")


@dataclass
class DataSource:
    """Where the data of a run comes from. Keys have the names of transformers' examples, if those have them."""

    dataset_name: str | None = HfArg(default=None, help="Data set on the Hub, such as Salesforce/wikitext.")
    dataset_config_name: str | None = HfArg(default=None, help="Its configuration, such as wikitext-103-raw-v1.")
    train_split_name: str | None = HfArg(default=None, help="Name of its training split; default train.")
    validation_split_name: str | None = HfArg(default=None, help="Name of its validation split; default validation.")
    test_split_name: str | None = HfArg(default=None, help="Name of its test split; default test.")
    train_file: str | None = HfArg(
        default=None,
        help="Training files, instead of dataset_name. Functions: JSON lines, a JSON array, CSV or Parquet. Text: "
        "read as bytes, or documents as JSON lines. They may be compressed, as .gz or .xz.",
    )
    validation_file: str | None = HfArg(default=None, help="Validation files, as train_file.")
    test_file: str | None = HfArg(default=None, help="Test files, as train_file.")

    def __post_init__(self) -> None:
        if self.dataset_name and self.files:
            raise ValueError(f"dataset_name={self.dataset_name!r} and {self.files}: give one of the two.")

    @property
    def files(self) -> dict[str, str]:
        """The files that are given, by split."""
        return {split: path for split in SPLITS if (path := getattr(self, f"{split}_file")) is not None}

    @property
    def origin(self) -> str:
        """Where the data comes from, in words."""
        return self.dataset_name or ", ".join(self.files.values()) or "the embedded data, as no file is named"


def kind_of_file(path: str | Path) -> str:
    """The extension of a data file without that of its compression, such as `.jsonl`."""
    name = Path(path)
    return (Path(name.stem).suffix if name.suffix.lower() in (".gz", ".xz") else name.suffix).lower()


@contextmanager
def open_compressed(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a data file for reading bytes; decompress it if it ends in `.gz` or `.xz`, or begins like such a file.

    Raises:
        ValueError: an archive, a binary table, or a damaged file.
    """
    with open(path, "rb") as file:
        start = file.read(5)
    by_content = (opener for mark, opener in _COMPRESSED.items() if start.startswith(mark))
    opener = _OPENERS.get(Path(path).suffix) or next(by_content, open)
    try:
        with opener(path, "rb") as file:
            start = file.read(265)
            if start.startswith(_ARCHIVES) or start[257:262] == b"ustar":
                raise ValueError(f"{path} is an archive or a binary table, not a text. Unpack or convert it.")
            file.seek(0)
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}). Copy or download it again.") from error


def read_table(path: str | Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, each with its place. The format is found from the content, whatever the name.

    JSON lines (as unparsed bytes), a JSON array, or CSV with a header, all three compressed or not; or Parquet.

    Raises:
        ValueError: the file is none of these, damaged, or not in UTF-8.
    """
    with open(path, "rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    rows = _parquet_rows
    if not is_parquet:
        with open_compressed(path) as file:
            start = file.read(4096).removeprefix(_BOM).lstrip()[:1]
        rows = {b"": json_lines, b"{": json_lines, b"[": _json_array}.get(start, _csv_rows)
    try:
        yield from rows(path)
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV with commas: {error}.") from error
    except (ArrowInvalid, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _parquet_rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    file = ParquetFile(path)
    schema = file.schema_arrow
    features = datasets.Features.from_arrow_schema(schema) if b"huggingface" in (schema.metadata or {}) else None
    rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
    yield from numbered(f"{path}, row", with_names_of_classes(rows, features))


def with_names_of_classes(rows: Iterable[Any], features: Mapping[str, Any] | None) -> Iterator[Any]:
    """Rows of a data set, with class names instead of class numbers, since each data set orders classes in its way."""
    classes = {name: kind for name, kind in (features or {}).items() if isinstance(kind, datasets.ClassLabel)}
    for row in rows:
        known = {name: row[name] for name in classes if row[name] is not None and row[name] >= 0}
        yield {**row, **{name: classes[name].int2str(number) for name, number in known.items()}}


def _json_array(path: str | Path) -> Iterator[tuple[str, Any]]:
    with open_compressed(path) as file:
        rows = json.loads(file.read())
    yield from numbered(f"{path}, entry", rows)


def _csv_rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # fits a C long on Windows; some functions exceed the default of 131,072
    with open_compressed(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader, row = csv.DictReader(text, strict=True), None
        names = [name for name in reader.fieldnames or () if name]  # Excel leaves empty ones behind
        if len(set(names)) < len(names):
            raise ValueError(f"{path}: two columns have the same name, among {brief(names)}.")
        for row in reader:
            yield f"{path}, line {reader.line_num}", row
        if row is None:
            raise ValueError(f"{path} is not JSON, and as CSV it has no rows, but a header alone: {brief(names)}.")


def json_lines(path: str | Path) -> Iterator[tuple[str, Any]]:
    """The lines of a JSON lines file that are not blank, each with its place, as unparsed bytes."""
    with open_compressed(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}, line {number}", line


def numbered(place: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Rows, each with its place: a number from 1."""
    for number, row in enumerate(rows, 1):
        yield f"{place} {number}", row


def checked(rows: Iterable[tuple[str, Any]], read: Callable[[Any], Row]) -> Iterator[Row]:
    """Turn each row into an example with `read`, which raises a ValueError for a bad row.

    A row comes with its place: file and line, or data set, split and row. Unparsed JSON is bytes.

    Raises:
        ValueError: after the last row, with the first ten bad rows, grouped by fault, and the number of bad rows.
    """
    bad, total = dict[str, list[str]](), 0  # places by fault
    for place, row in rows:
        try:
            yield read(json.loads(row) if isinstance(row, bytes) else row)
        except (ValueError, RecursionError) as error:
            total += 1
            if total <= MOST_NAMED:
                bad.setdefault(str(error), []).append(place)
    if bad:
        more = f" … {total} bad rows in all." if total > MOST_NAMED else ""
        raise ValueError("; ".join(f"{', '.join(places)}: {fault}" for fault, places in bad.items()) + more)


def sources_of(source: DataSource, only: str | None = None, **keywords: Any) -> dict[str, Any]:
    """The file of each split, or its data set on the Hub or in a local folder that `datasets` reads, by our names.

    With `only`, the split to score, returns just that split, or all if it is missing and has to be made from the
    training split. `keywords` are those of `load_dataset`. Raises a ValueError if a split that is needed is missing.
    """
    found: dict[str, Any] = source.files
    if source.dataset_name is not None:
        found = _load_splits(source, only, keywords)
    elif "train" not in found and only not in found:
        raise ValueError(f"train_file=None: it is needed{'' if only is None else f', {only}_file, or another split'}.")
    return {only: found[only]} if only in found else found


def _load_splits(source: DataSource, only: str | None, keywords: dict[str, Any]) -> dict[str, Any]:
    name, config = source.dataset_name, source.dataset_config_name
    try:
        loaded = datasets.load_dataset(name, config, **keywords)
    # The data set needs a script, has several configurations (listed in the error), or has an unreadable file.
    except (RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"dataset_name={name!r}, dataset_config_name={config!r}: {error!s:.1000}") from error
    names = {split: getattr(source, f"{split}_split_name") or split for split in SPLITS}
    needed = [split for split in SPLITS if getattr(source, f"{split}_split_name")]
    if only is None:
        needed += ["train", "validation"] if keywords.get("streaming") else ["train"]
    if only != "test" and any(each.startswith(("val", "dev")) for each in loaded):
        needed.append("validation")  # otherwise part of the training split would be used instead
    for split in needed:
        if names[split] not in loaded:
            raise ValueError(
                f"dataset_name={name!r} has the splits {', '.join(loaded)}, but no {names[split]!r}. Name its {split} "
                f"split by {split}_split_name."
            )
    return {split: loaded[names[split]] for split in SPLITS if names[split] in loaded}
