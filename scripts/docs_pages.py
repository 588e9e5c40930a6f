"""A hook of mkdocs: add the pages of the repository's top level, and results/, to those of docs/.

The README becomes the first page. In all pages links are written as they work in the repository; here they are turned
into those of the site, where docs/ and the top level are one folder.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "RESULTS.md", "SUPPORTED.md", "PROGRAMS.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the files that lie outside of docs/."""
    results = [path for kind in ("md", "png") for path in sorted((ROOT / "results").rglob(f"*.{kind}"))]
    for path in [*(ROOT / name for name in PAGES), *results]:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, "index.md" if name == "README.md" else name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    markdown = re.sub(r"\]\((?:\.\./|docs/)(?=\w)", "](", markdown)
    return re.sub(r"\]\(README\.md", "](index.md", markdown)
