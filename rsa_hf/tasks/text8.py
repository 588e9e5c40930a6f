"""text8: Wikipedia as 27 symbols, the letters a-z and single spaces. The recipe, and a tokenizer.

text8 is the first 10⁸ characters of what this recipe makes of the dump enwik9 (M. Mahoney, About the test data,
mattmahoney.net/dc/textdata): the text that a reader of the page sees, in lower case, with digits spelled out and
everything else replaced by spaces.
"""

import re
import string

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

TEXT8_SYMBOLS = " " + string.ascii_lowercase

# The order matters: each substitution reads the result of those before it.
_SUBSTITUTIONS = (
    (rb"&amp;", b"&"),
    (rb"&lt;", b"<"),
    (rb"&gt;", b">"),
    (rb"<ref[^<]*</ref>", b""),  # footnotes
    (rb"<[^>]*>", b""),  # HTML tags
    (rb"\[http:[^] ]*", b"["),  # addresses, but not the text of their links
    (rb"(?i)\|thumb", b""),  # how pictures are shown
    (rb"(?i)\|left", b""),
    (rb"(?i)\|right", b""),
    (rb"(?i)\|\d+px", b""),
    (rb"(?i)\[\[image:[^\[\]]*\|", b""),  # pictures, but not their captions
    (rb"(?i)\[\[category:([^|\]]*)[^]]*\]\]", rb"[[\1]]"),
    (rb"\[\[[a-z\-]*:[^\]]*\]\]", b""),  # the page in other languages
    (rb"\[\[[^|\]]*\|", b"[["),  # targets of links, but not their text
    (rb"\{\{[^}]*\}\}", b""),  # templates
    (rb"\{[^}]*\}", b""),  # tables
    (rb"[\[\]]", b""),
    (rb"&[^;]*;", b" "),  # named characters
)
_DIGITS = (b"zero", b"one", b"two", b"three", b"four", b"five", b"six", b"seven", b"eight", b"nine")


def clean_text8(dump: bytes) -> bytes:
    """Reduce a Wikipedia dump, the XML of pages from its beginning, such as enwik8, to the 27 symbols of text8.

    The dump may end within a page. Each page begins with a space; redirects are left out.
    """
    # A raw < is always markup of the dump: in the text of a page it is written &lt;.
    pages = re.findall(rb"<text [^>]*[^/>]>([^<]*)", dump)
    return b"".join(_clean(page) for page in pages if not re.search(rb"(?i)#redirect", page))


def _clean(page: bytes) -> bytes:
    for pattern, replacement in _SUBSTITUTIONS:
        page = re.sub(pattern, replacement, page)
    page = re.sub(rb"[0-9]", lambda digit: b" %s " % _DIGITS[int(digit[0])], page.lower())
    words = re.sub(rb"[^a-z]+", b" ", page).strip()
    return b" " + words if words else b""


def text8_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per symbol: 0 is the space, 1 … 26 are a … z. It refuses other characters."""
    tokenizer = Tokenizer(WordLevel({symbol: token for token, symbol in enumerate(TEXT8_SYMBOLS)}))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
