"""text8: the recipe rule by rule, the beginning of the published text, and the tokenizer."""

import lzma
import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rsa_hf.tasks.language_modeling import load_language_modeling_tokenizer
from rsa_hf.tasks.text8 import TEXT8_SYMBOLS, clean_text8


def page(text, attributes='xml:space="preserve"'):
    return f"<page>\n<title>A 1</title>\n<text {attributes}>{text}</text>\n</page>\n".encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, World!", " hello world"),
        ("a0b", " a zero b"),
        ("caf\u00e9s", " caf s"),
        ("&lt;b&gt;bold&lt;/b&gt; move", " bold move"),
        ("said&lt;ref name=&quot;x&quot;&gt;p. 7&lt;/ref&gt; he", " said he"),
        ("&amp;nbsp;x&amp;nbsp;y", " x y"),
        ("[http://a.org/ the site] and [http://b.org]", " the site and"),
        ("[[Russia]] and [[France|the French]]", " russia and the french"),
        ("[[Image:x.jpg|thumb|left|200px|a [[link]] in it]]", " a link in it"),
        ("[[Category:Birds|*]] [[category:Fish]]", " birds fish"),
        ("[[de:Vogel]] end [[zh-min-nan:X]]", " end"),
        ("{{cite|a}} t {| table |} u", " t u"),
        ("#REDIRECT [[Elsewhere]]", ""),
        ("about\n#redirect pages", ""),
    ],
)
def test_the_recipe_rule_by_rule(text, expected):
    assert clean_text8(page(text)).decode() == expected


def test_pages_are_joined_and_the_last_may_be_cut_off():
    dump = page("one") + page("#redirect [[x]]") + page("", 'xml:space="preserve" /') + page("two three")
    assert clean_text8(dump) == b" one two three"
    assert clean_text8(dump[: dump.index(b"three") + 2]) == b" one two th"


def test_the_beginning_of_wikipedia_becomes_the_published_beginning_of_text8(data_folder):
    dump = lzma.decompress((data_folder / "enwik8" / "enwik8_prefix.xz").read_bytes())[:400_000]
    text = clean_text8(dump).decode()
    assert text.startswith(
        " anarchism originated as a term of abuse first used against early working class radicals including the "
        "diggers of the english revolution and the sans culottes of the french revolution whilst the term is still "
    )
    assert re.fullmatch(r"( [a-z]+)+", text)
    assert set(text) == set(TEXT8_SYMBOLS)


def test_the_tokenizer_has_a_token_for_each_symbol_and_refuses_others(tmp_path):
    tokenizer = load_language_modeling_tokenizer("text8")
    text = " the quick  brown fox z"
    ids = tokenizer(text)["input_ids"]
    assert ids == [TEXT8_SYMBOLS.index(symbol) for symbol in text]
    assert len(tokenizer) == 27 and tokenizer.decode(ids) == text
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):  # tokenizers raises a plain Exception
        tokenizer(" not Fine")
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids


def test_the_script_writes_the_number_of_characters_asked_for(tmp_path, monkeypatch):
    (tmp_path / "dump").write_bytes(page("one two 3"))
    script = Path(__file__).parents[2] / "scripts" / "make_text8.py"
    arguments = [script, tmp_path / "dump", tmp_path / "data" / "text8.txt", "--characters", "9"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "data" / "text8.txt").read_text() == " one two "
