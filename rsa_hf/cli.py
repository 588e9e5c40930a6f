"""`rsa-hf`: the command line. A user's mistake ends in one line on stderr and exit code 2, without a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _about() -> None:
    """Self-attention with recurrence (RSA) for any pretrained Hugging Face Transformer."""


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the Hub.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also write the decay curves and gates to this PNG.")] = None,
) -> None:
    """Show the gates and rates of a patched checkpoint, layer by layer.

    Example: rsa-hf inspect outputs/demo/patched --plot rsa.png
    """
    # Imported here: `rsa-hf --help` should not take as long as importing torch does.
    import transformers
    from transformers import AutoModel

    from rsa_hf.report import rsa_report

    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise ValueError(f"{path}: there is no such folder. Name the folder of a checkpoint, or a model on the Hub.")
    transformers.logging.disable_progress_bar()
    report = rsa_report(AutoModel.from_pretrained(str(Path(path).expanduser())))
    if not report.layers:
        raise ValueError(f"{path} is a plain checkpoint: it has no RSA heads to show.")
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)
    if plot is not None:
        from rsa_hf.plots import plot_rem

        plot_rem(report, plot)
        print(f"written: {plot}")


def main() -> None:
    """Run the command line; the exit code is 0, or 2 after a user's mistake."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
