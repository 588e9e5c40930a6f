"""text8: Wikipedia as 27 symbols, the letters a–z and single spaces; how it is made, and its tokenizer.

The data set text8 is the first 10⁸ characters of what this recipe makes of the dump enwik9 (M. Mahoney, About the
test data, mattmahoney.net/dc/textdata): only what a reader of the page would see, in lower case, its digits spelled
out, and everything else a space.
"""

from __future__ import annotations

import re
import string

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

__all__ = ["TEXT8_SYMBOLS", "clean_text8", "text8_tokenizer"]

TEXT8_SYMBOLS = " " + string.ascii_lowercase

# A raw < is always markup of the dump: in the text of a page it is written &lt;.
_PAGE = re.compile(rb"<text [^>]*[^/>]>([^<]*)")
_REDIRECT = re.compile(rb"#redirect", re.IGNORECASE)
# In this order, as each reads what those before it have left.
_SUBSTITUTIONS = tuple(
    (re.compile(pattern, re.IGNORECASE if ignore_case else 0), replacement)
    for pattern, replacement, ignore_case in (
        (rb"&amp;", b"&", False),
        (rb"&lt;", b"<", False),
        (rb"&gt;", b">", False),
        (rb"<ref[^<]*</ref>", b"", False),  # footnotes
        (rb"<[^>]*>", b"", False),  # tags of HTML
        (rb"\[http:[^] ]*", b"[", False),  # addresses, but not the words that stand for them
        (rb"\|thumb", b"", True),  # pictures: how they are shown
        (rb"\|left", b"", True),
        (rb"\|right", b"", True),
        (rb"\|\d+px", b"", True),
        (rb"\[\[image:[^\[\]]*\|", b"", True),  # … and all but the caption
        (rb"\[\[category:([^|\]]*)[^]]*\]\]", rb"[[\1]]", True),
        (rb"\[\[[a-z\-]*:[^\]]*\]\]", b"", False),  # the page in other languages
        (rb"\[\[[^|\]]*\|", b"[[", False),  # links: the words that are shown
        (rb"\{\{[^}]*\}\}", b"", False),  # templates
        (rb"\{[^}]*\}", b"", False),  # tables
        (rb"[\[\]]", b"", False),
        (rb"&[^;]*;", b" ", False),  # named characters
    )
)
_DIGIT = re.compile(rb"[0-9]")
_DIGITS = (b"zero", b"one", b"two", b"three", b"four", b"five", b"six", b"seven", b"eight", b"nine")
_OTHERS = re.compile(rb"[^a-z]+")


def clean_text8(dump: bytes) -> bytes:
    """The text of a Wikipedia dump in 27 symbols, as that of text8.

    Args:
        dump: the XML of pages, such as enwik8, from its beginning; it may end within a page.

    Returns:
        Letters a–z and single spaces: each page with a space before it, those that only lead to another left out.
    """
    pages = (page for page in _PAGE.findall(dump) if not _REDIRECT.search(page))
    return b"".join(_clean(page) for page in pages)


def _clean(page: bytes) -> bytes:
    for pattern, replacement in _SUBSTITUTIONS:
        page = pattern.sub(replacement, page)
    page = _DIGIT.sub(lambda digit: b" %s " % _DIGITS[int(digit[0])], page.lower())
    words = _OTHERS.sub(b" ", page).strip()
    return b" " + words if words else b""


def text8_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the 27 symbols, one token each: 0 is the space, 1 … 26 are a … z; it refuses all others."""
    tokenizer = Tokenizer(WordLevel({symbol: token for token, symbol in enumerate(TEXT8_SYMBOLS)}))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
