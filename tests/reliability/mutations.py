"""Protections, each with the edit that takes it out and the test that must go red then."""

from __future__ import annotations

from dataclasses import dataclass

from reliability.record import Part


@dataclass(frozen=True)
class Mutation:
    """A protection that is taken out.

    Attributes:
        part: the promise that it keeps.
        protection: what it is, in a few words.
        file: where it is, below the project's root.
        old: the text that is replaced; it must stand there once.
        new: the text in its place.
        red: the test that must fail, as pytest names it.
    """

    part: Part
    protection: str
    file: str
    old: str
    new: str
    red: str


MUTATIONS = [
    Mutation(
        Part.HOSTILE_FILES,
        "YAML is read by a safe loader",
        "rsa_hf/plain_yaml.py",
        "class _Loader(yaml.SafeLoader)",
        "class _Loader(yaml.UnsafeLoader)",
        "tests/reliability/test_no_code_runs.py::test_yaml_runs_nothing",
    ),
    Mutation(
        Part.MOVING_TRANSFORMERS,
        "the version of transformers is checked",
        "rsa_hf/versions.py",
        "if not Version(low) <= Version(transformers.__version__) < Version(high):",
        "if False:",
        "tests/test_hooks.py::test_a_version_outside_the_range_is_named",
    ),
]
