"""A defect-detection data set that needs no download: functions of the standard library with injected defects.

Every function and method of the installed Python's standard library within the length bounds enters the data twice:
unchanged (target 0), and with a single defect injected into its syntax tree (target 1).

* Pairs stay together, next to each other in one split: topic, style and length are equal in both classes.
* Files are split by a hash of their path, whatever the seed and the bounds. Of functions equal up to names and
  constants (type-2 clones) only one is kept, so that no copy of a training function is in the test split.
* Docstrings are stripped and both members are printed by `ast.unparse`: layout and comments do not reveal the label.
* A defective text parses back to the injected tree, compiles to bytecode unlike the original's, and is not the text
  of another function. Error messages, f-strings, default values, annotations and decorators are not changed: a change
  there is hardly a defect.
"""

import ast
import hashlib
import os
import random
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from operator import setitem
from types import CodeType
from typing import Any, NamedTuple

DEFECT_KINDS = (
    "off_by_one",  # an index, a slice bound, a range or a compared integer moves by one
    "boundary_comparison",  # < becomes <=, > becomes >=, and back
    "reversed_comparison",  # < becomes >, <= becomes >=, and back
    "negated_comparison",  # == becomes !=, `is` becomes `is not`, < becomes >=, and back
    "swapped_arguments",  # two neighbouring positional arguments of a call change places
    "wrong_variable",  # a local variable is read where another one was meant
    "missing_not",  # `not x` becomes `x`
    "extra_not",  # the condition `x` becomes `not x`
    "swapped_and_or",  # `and` becomes `or`, and back
    "missing_return",  # `return f(x)` becomes `f(x)`, `return x` disappears
    "wrong_operator",  # + becomes -, * becomes //, << becomes >>, & becomes |, and back
    "flipped_boolean",  # True becomes False, and back
)

_EXCLUDED_FOLDERS = {  # tests, demonstrations, generated tables, and what is not the standard library
    *("test", "tests", "idlelib", "turtledemo", "encodings", "pydoc_data", "lib2to3", "ensurepip"),
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__"),
}
_SPLIT_ENDS = {"train": 0.7, "validation": 0.8, "test": 1.0}  # upper ends of intervals of the path's hash
_SYMMETRIC_CALLS = {"gcd", "hypot", "isclose", "lcm", "max", "min"}  # swapping their arguments changes nothing

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)  # nodes that contain statements
_SCOPES = (_Function, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_Edit = tuple[str, Callable[[], None]]


def _both_ways(*pairs: tuple[type[ast.AST], type[ast.AST]]) -> dict[type[ast.AST], type[ast.AST]]:
    return dict(pairs) | {new: old for old, new in pairs}


_COMPARISONS = {
    "boundary_comparison": _both_ways((ast.Lt, ast.LtE), (ast.Gt, ast.GtE)),
    "reversed_comparison": _both_ways((ast.Lt, ast.Gt), (ast.LtE, ast.GtE)),
    "negated_comparison": _both_ways(
        (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE)
    ),
}
_OPERATORS = _both_ways(
    (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr)
)


@dataclass(frozen=True)
class Example:
    """One function of a defect-detection data set. Only embedded functions have a path, a name and a kind."""

    func: str  # its source
    target: int  # 1 for a defective function, 0 for a clean one
    path: str = ""  # its file, relative to the standard library
    name: str = ""  # its qualified name within the file
    kind: str = ""  # the injected defect, one of `DEFECT_KINDS`; empty for a clean function
    idx: int | str | None = None  # its index in a data set that has one, a number if it is whole
    pair: int | None = None  # shared with its twin: the same function with, or without, the defect
    project: str = ""  # that it comes from, if the data says so
    time: Any = None  # when it was written, if the data says so


def load_python_defects(
    seed: int = 0, min_characters: int = 60, max_characters: int = 400, kinds: Sequence[str] | None = None
) -> dict[str, list[Example]]:
    """Build the embedded data set: in each split, every clean function is followed by its defective twin.

    It depends only on the arguments and on the installed standard library. The seed orders the functions and their
    defects, but does not choose the split of a file. The lengths bound clean and defective functions. The kinds of
    defect, from `DEFECT_KINDS` (None: all), are spread over each split as evenly as the functions allow.
    """
    kinds = DEFECT_KINDS if kinds is None else kinds
    if not set(kinds) <= set(DEFECT_KINDS):
        raise ValueError(f"defect_kinds={list(kinds)}: choose of {', '.join(DEFECT_KINDS)}, or null for all.")
    corpus = list(_corpus(sysconfig.get_path("stdlib"), min_characters, max_characters))
    rng = random.Random(seed)
    rng.shuffle(corpus)
    taken = {clean.func for clean in corpus}
    usage = {split: Counter[str]() for split in _SPLIT_ENDS}
    splits: dict[str, list[Example]] = {split: [] for split in _SPLIT_ENDS}
    lengths = range(min_characters, max_characters + 1)
    for clean in corpus:
        split = _split_of(clean.path)
        defect = _inject(clean.func, kinds, usage[split], taken, lengths, rng)
        if defect is not None:
            func, kind = defect
            taken.add(func)
            usage[split][kind] += 1
            pair = len(splits[split]) // 2
            splits[split] += [replace(clean, pair=pair), Example(func, 1, clean.path, clean.name, kind, pair=pair)]
    return splits


def _split_of(path: str) -> str:
    position = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") / 2**32
    return next(split for split, end in _SPLIT_ENDS.items() if position < end)


@lru_cache(maxsize=2)
def _corpus(root: str, min_characters: int, max_characters: int) -> tuple[Example, ...]:
    """The functions below `root` in path order, one of each group of type-2 clones."""
    corpus, seen = [], set()
    for path in _source_files(root):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in old files
            try:
                with tokenize.open(os.path.join(root, path)) as file:
                    tree = ast.parse(file.read())
            except (SyntaxError, UnicodeDecodeError):
                continue  # templates and deliberately broken files
        for name, function in _functions(tree, ""):
            for node in ast.walk(function):
                if isinstance(node, (_Function, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
                    node.body = node.body[1:] or [ast.Pass()]
            text = ast.unparse(function)
            if min_characters <= len(text) <= max_characters:
                clone_group = tuple(type(node) for node in ast.walk(function))
                if clone_group not in seen:
                    corpus.append(Example(text, 0, path, name))
                seen.add(clone_group)
    return tuple(corpus)


def _source_files(root: str) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _EXCLUDED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    """Yield the qualified name and tree of each function and method that is not nested in a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, _BLOCKS):
            yield from _functions(child, prefix)


def _inject(
    clean: str, kinds: Sequence[str], usage: Counter[str], taken: set[str], lengths: range, rng: random.Random
) -> tuple[str, str] | None:
    """The text with one defect, and its kind; None if no defect fits."""
    tree = _parse(clean)
    if ast.unparse(tree) != clean:
        return None  # printing the tree again would change it, and so reveal the defective text
    edits = _edits(tree)
    order = [index for index, (kind, _) in enumerate(edits) if kind in kinds]
    rng.shuffle(order)
    order.sort(key=lambda index: usage[edits[index][0]])
    for attempt, index in enumerate(order):
        if attempt > 0:  # the previous edit changed the tree
            tree = _parse(clean)
            edits = _edits(tree)
        kind, apply = edits[index]
        apply()
        defective = ast.unparse(tree)
        if (
            defective not in taken
            and len(defective) in lengths
            and ast.unparse(_parse(defective)) == defective
            and _bytecode(defective) != _bytecode(clean)
        ):
            return defective, kind
    return None


def _parse(text: str) -> Any:
    return ast.parse(text).body[0]


def _bytecode(text: str) -> tuple[object, ...]:
    """The bytecode of a function, without file names and line numbers."""

    def content(code: CodeType) -> tuple[object, ...]:
        constants = tuple(content(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
        return code.co_code, code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars, constants

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns of some defects
        return content(compile(text, "<function>", "exec", dont_inherit=True))


class _Slot(NamedTuple):
    """A position in a syntax tree: the node there, and how to replace it."""

    node: ast.AST
    parent: ast.AST
    field: str
    put: Callable[[ast.AST], None]
    own_scope: bool  # of the function, not of one inside it


def _slots(parent: ast.AST, own_scope: bool = True) -> Iterator[_Slot]:
    """Every position below `parent` that may get a defect, in source order."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "decorator_list", "msg", "returns", "type_params"):
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            # A node without fields is an operator or a context; the edits of its parent replace it.
            if not getattr(node, "_fields", ()) or isinstance(node, (ast.arguments, ast.JoinedStr, ast.Raise)):
                continue
            put = partial(setitem, value, index) if isinstance(value, list) else partial(setattr, parent, field)
            yield _Slot(node, parent, field, put, own_scope)
            yield from _slots(node, own_scope and not isinstance(node, _SCOPES))


def _edits(function: _Function) -> list[_Edit]:
    """Every possible defect: its kind, and what injects it into `function` in place."""
    slots = list(_slots(function))
    bindings = _bindings(function, slots)
    return [edit for slot in slots for edit in _slot_edits(slot, bindings)]


def _slot_edits(slot: _Slot, bindings: dict[str, int]) -> Iterator[_Edit]:
    match slot.node:
        case ast.Compare(ops=[operator]) as node:
            for kind, table in _COMPARISONS.items():
                if type(operator) in table:
                    yield kind, partial(setattr, node, "ops", [table[type(operator)]()])
        case ast.Call(func=ast.Name(id=callee) | ast.Attribute(attr=callee), args=args) as node:
            for i, (first, second) in enumerate(pairwise(args)):
                starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
                if callee not in _SYMMETRIC_CALLS and not starred and ast.dump(first) != ast.dump(second):
                    swapped = [*args[:i], second, first, *args[i + 2 :]]
                    yield "swapped_arguments", partial(setattr, node, "args", swapped)
        case ast.Name(id=name, ctx=ast.Load()) as node if slot.own_scope and name in bindings:
            for other, line in bindings.items():
                if other != name and line < node.lineno:
                    yield "wrong_variable", partial(setattr, node, "id", other)
        case ast.UnaryOp(op=ast.Not(), operand=operand) if not _is_nested_junction(operand, slot.parent):
            yield "missing_not", partial(slot.put, operand)
        case ast.BoolOp(op=junction) as node if not any(
            _is_nested_junction(node, neighbour) for neighbour in (slot.parent, *node.values)
        ):
            other_junction = ast.Or() if isinstance(junction, ast.And) else ast.And()
            yield "swapped_and_or", partial(setattr, node, "op", other_junction)
        case ast.Return(value=ast.Call() | ast.Await() as value):
            yield "missing_return", partial(slot.put, ast.Expr(value))
        case ast.Return(value=ast.expr() as value) as node if not isinstance(value, ast.Constant):
            block = getattr(slot.parent, slot.field)
            if len(block) > 1:  # an empty block is a syntax error
                yield "missing_return", partial(block.remove, node)
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) as node:
            if type(operator) in _OPERATORS and not any(map(_is_sequence, ast.iter_child_nodes(node))):
                yield "wrong_operator", partial(setattr, node, "op", _OPERATORS[type(operator)]())
        case ast.Constant(value=bool(value)) if not isinstance(slot.parent, ast.While):
            yield "flipped_boolean", partial(slot.put, ast.Constant(not value))
    if slot.field == "test" and isinstance(slot.node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        yield "extra_not", partial(slot.put, ast.UnaryOp(ast.Not(), slot.node))
    for new in _neighbours(slot):
        yield "off_by_one", partial(slot.put, new)


def _bindings(function: _Function, slots: list[_Slot]) -> dict[str, int]:
    """The local variables except `self` and `cls`, each with the line that binds it first."""
    given = function.args
    bindings = {argument.arg: 0 for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    outer = {"self", "cls"}
    for slot in slots:
        match slot.node:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                outer.update(names)
            case ast.Name(id=name, ctx=ast.Store()) as node if slot.own_scope:
                bindings.setdefault(name, node.lineno)
    return {name: line for name, line in bindings.items() if name not in outer}


def _neighbours(slot: _Slot) -> list[ast.expr]:
    """The off-by-one variants of a node; empty unless it is an index, a range or a bound."""
    match slot.parent:
        case ast.Slice() | ast.Call(func=ast.Name(id="range")) if slot.field in ("lower", "upper", "args"):
            counts = True
        case ast.Subscript() if slot.field == "slice":
            counts = False
        case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() | ast.Eq() | ast.NotEq()]) as compare:
            # Nobody writes `len(x) + 1 < 2` by mistake; if the other side is a number, that number is changed.
            sides = (compare.left, *compare.comparators)
            is_length = isinstance(slot.node, ast.Call) and ast.unparse(slot.node.func) == "len"
            counts = is_length and not any(isinstance(side, ast.Constant) for side in sides)
        case _:
            return []
    match slot.node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return [_literal(value - 1), _literal(value + 1)]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return [_literal(-value - 1), _literal(-value + 1)]
        case ast.BinOp(op=ast.Add() | ast.Sub() as sign, left=left, right=ast.Constant(value=int(value))):
            less = left if value == 1 else ast.BinOp(left, sign, _literal(value - 1))
            return [less, ast.BinOp(left, sign, ast.Constant(value + 1))]
        case (ast.Name() | ast.Attribute() | ast.Call() | ast.BinOp()) as node if counts:
            return [ast.BinOp(node, operator, ast.Constant(1)) for operator in (ast.Add(), ast.Sub())]
    return []


def _is_nested_junction(node: ast.AST, neighbour: ast.AST) -> bool:
    """Whether an edit could leave parentheses as in `(a and b) and c`, which nobody writes."""
    return isinstance(node, ast.BoolOp) and isinstance(neighbour, ast.BoolOp)


def _literal(value: int) -> ast.expr:
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))


def _is_sequence(node: ast.AST) -> bool:
    """Whether `node` is certainly text, a list or a tuple, on which arithmetic would fail at once."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_text or isinstance(node, (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple))
