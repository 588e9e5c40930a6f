"""Lines of the defect data by the hundred: an error that names the line, or the function and the label that it holds."""

import json

import pytest

from reliability import hostile
from reliability.record import try_many
from rsa_hf.tasks.defect_data import read_json_lines


def test_data_lines(tmp_path):
    path = tmp_path / "lines.jsonl"

    def case(random):
        line = hostile.data_line(random)
        path.write_bytes(line)
        try:
            examples = read_json_lines(path)
        except ValueError as error:
            if f"{path}, line 1: " not in str(error):
                raise LookupError(f"the line is not named: {error}") from error
            raise
        if not line.strip():
            assert examples == []
            return
        (example,) = examples
        row = json.loads(line)
        assert (example.func, example.target) == (row["func"], row["target"])
        assert example.func.strip() and example.func.encode()
        assert type(example.target) is int

    came_out = try_many("data lines", case, (ValueError,))
    assert min(came_out["right answer"], came_out["refused: ValueError"]) > 50


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"func": "\\ud800", "target": 0}', "surrogates not allowed"),
        (json.dumps({"func": " " * 10**6, "target": 0}).encode(), "is no labelled function"),
        (json.dumps({f"k{i}": 0 for i in range(10**5)}).encode(), "is no labelled function"),
    ],
)
def test_messages_are_short(line, words, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=words) as error:
        read_json_lines(tmp_path / "x.jsonl")
    assert len(str(error.value)) < 2000
