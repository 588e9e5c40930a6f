"""Measure the package room by room: modules, lines, longest file, hooks, floors of the import graph.

    python scripts/house.py                    # this checkout
    python scripts/house.py --against ../0.1   # another one, before and after

A room is a folder of rsa_hf; the files beside the folders are the room `root`. Lines are those of the .py files, blank
lines and comments included. A hook is one function of another library that the package replaces (one `Hook` made while
rsa_hf is imported). The floors are the longest chain of rooms, each file of the root being a room of its own here, of
which each imports the next; imports inside of functions count. Rooms that import each other share a floor.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METHOD = ("root", "ops", "integration", "hub")

# Version 0.1 had other folders, and 37 files beside them: where each is now. The rest keeps its folder.
ROOMS_OF_0_1 = {
    "product": "ops",
    "geometry.py": "ops",
    **dict.fromkeys(("adapters", "hooks", "attention_modules.py", "arming.py"), "integration"),
    **dict.fromkeys(("peft_hooks.py", "adapter_plan.py", "checkpoint.py"), "integration"),
    **dict.fromkeys(("card.py", "hub.py"), "hub"),
    **dict.fromkeys(("reproduce", "theory"), "experiments"),
    "metrics": "tasks",
    **dict.fromkeys(("versions.py", "brief.py", "checks.py", "plain_yaml.py"), "utils"),
    **dict.fromkeys(("locate.py", "table.py", "credentials.py", "storage.py"), "utils"),
}

# Printed by a process whose first `rsa_hf` is the one to measure.
COUNT_HOOKS = """
import json, sys
import peft, transformers.trainer
hooks = {}
def watch(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "__init__" and frame.f_code.co_filename == "<string>":
        kind = type(frame.f_locals.get("self"))
        if kind.__name__ == "Hook" and kind.__module__.startswith("rsa_hf"):
            values = frame.f_locals
            name = f"{getattr(values['owner'], '__name__', values['owner'])}.{values['name']}"
            hooks[name] = frame.f_back.f_code.co_filename
sys.setprofile(watch)
import rsa_hf.peft
sys.setprofile(None)
print(json.dumps(hooks))
"""


@dataclass
class Room:
    """What is measured of one room."""

    modules: int = 0
    lines: int = 0
    longest: tuple[int, str] = (0, "")
    hooks: int = 0


def room_of(file: Path, package: Path) -> str:
    first = file.relative_to(package).parts[0]
    if (package / "reproduce").is_dir():  # the layout of 0.1
        first = ROOMS_OF_0_1.get(first, first)
    return "root" if first.endswith(".py") else first


def measure(package: Path) -> dict[str, Room]:
    rooms: dict[str, Room] = {}
    for file in sorted(package.rglob("*.py")):
        room = rooms.setdefault(room_of(file, package), Room())
        lines = len(file.read_text(encoding="utf-8").splitlines())
        room.modules += 1
        room.lines += lines
        room.longest = max(room.longest, (lines, str(file.relative_to(package))))
    for place in hooks(package).values():
        rooms[room_of(Path(place), package)].hooks += 1
    return rooms


def hooks(package: Path) -> dict[str, str]:
    """The functions that are replaced by importing rsa_hf, each with the file that lists it."""
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", COUNT_HOOKS]
    done = subprocess.run(command, env=environment, cwd=package.parent, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def imports(package: Path) -> dict[str, set[str]]:
    """For each folder and each file of the root the others that it imports."""
    graph: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        own = file.relative_to(package).with_suffix("").parts[0]
        found = graph.setdefault(own, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {part for alias in node.names if (part := part_of(alias.name, package))}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = {part_of(f"{node.module}.{alias.name}", package) for alias in node.names}
                found |= {part for part in named if part}
        found.discard(own)
    return graph


def part_of(dotted: str, package: Path) -> str | None:
    """The folder or file of the root that holds a name; None where it is no name of the package."""
    first, *rest = dotted.split(".")
    if first != package.name:
        return None
    place = package / rest[0] if rest else package
    return place.name if rest and (place.is_dir() or place.with_suffix(".py").is_file()) else "__init__"


def floors(graph: dict[str, set[str]]) -> int:
    """The number of rooms on the longest chain of imports."""
    reached = {room: reachable(room, graph) for room in graph}
    height: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in height:
            circle = {other for other in reached[room] if room in reached[other]} | {room}
            below = {other for member in circle for other in graph[member]} - circle
            level = 1 + max((of(other) for other in below), default=0)
            height.update(dict.fromkeys(circle, level))
        return height[room]

    return max(of(room) for room in graph)


def reachable(room: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def tests_lines(checkout: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (checkout / "tests").rglob("*.py"))


def table(before: dict[str, Room] | None, after: dict[str, Room]) -> list[str]:
    order = ["root", "ops", "integration", "hub"]
    order += sorted({*after, *(before or {})} - {*order})
    groups = [(name, [name]) for name in order]
    groups += [("the method (root, ops, integration, hub)", list(METHOD)), ("the package", order)]
    rows = ["| room | modules | lines | longest file | hooks |", "|---|---|---|---|---|"]
    for title, names in groups:
        measured = [total(rooms, names) for rooms in (before, after) if rooms is not None]
        cells = [
            [f"{room.modules}", f"{room.lines:,}", "{1} ({0})".format(*room.longest), f"{room.hooks}"]
            for room in measured
        ]
        rows.append(f"| {title} | " + " | ".join(" → ".join(column) for column in zip(*cells, strict=True)) + " |")
    return rows


def total(rooms: dict[str, Room], names: list[str]) -> Room:
    present = [rooms[name] for name in names if name in rooms]
    return Room(
        sum(room.modules for room in present),
        sum(room.lines for room in present),
        max((room.longest for room in present), default=(0, "none")),
        sum(room.hooks for room in present),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout to measure; default: this one")
    parser.add_argument("--against", type=Path, help="an earlier checkout, printed before it")
    args = parser.parse_args()
    checkouts = [path.resolve() for path in (args.against, args.checkout) if path is not None]
    rooms = [measure(checkout / "rsa_hf") for checkout in checkouts]
    print("\n".join(table(rooms[0] if len(rooms) == 2 else None, rooms[-1])))
    heights = " → ".join(str(floors(imports(checkout / "rsa_hf"))) for checkout in checkouts)
    print(f"\nFloors of the import graph: {heights}. Lines of tests: ", end="")
    print(" → ".join(f"{tests_lines(checkout):,}" for checkout in checkouts) + ".")


if __name__ == "__main__":
    main()
