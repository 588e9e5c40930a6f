"""Formal languages for next-character prediction, after Bhattamishra et al., 2020.

On the Ability and Limitations of Transformers to Recognize Formal Languages (arXiv 2009.11264).
"""

from rsa_hf.experiments.regular_languages.languages.automaton import AUTOMATA
from rsa_hf.experiments.regular_languages.languages.brackets import DyckPrefixes, Shuffle2
from rsa_hf.experiments.regular_languages.languages.language import Language, all_strings, legal_next
from rsa_hf.experiments.regular_languages.languages.splits import Splits, make_splits

__all__ = ["LANGUAGES", "Language", "Splits", "all_strings", "legal_next", "make_splits"]

# d-2 and d-4 are the paper's D_n: one kind of bracket, at most n deep. dyck-n has n kinds.
LANGUAGES: dict[str, Language] = {
    **AUTOMATA,
    "dyck-2": DyckPrefixes(kinds=2, depth=4),
    "dyck-4": DyckPrefixes(kinds=4, depth=4),
    "shuffle-2": Shuffle2(),
}
