"""`rsa-hf inspect`."""

import json
import sys
from typing import Annotated

import typer

from rsa_hf.cli.common import install_hooks, load_checkpoint, writable


def inspect(
    path: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the Hub.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[str | None, typer.Option(help="Also draw decay curves and gates into this PNG.")] = None,
) -> None:
    """Show where the gates and rates of a patched checkpoint started and where they are, layer by layer.

    Example: rsa-hf inspect outputs/demo/patched --plot rsa.png
    """
    install_hooks()
    from rsa_hf.patching import is_patched
    from rsa_hf.report import rsa_report
    from rsa_hf.utils.locate import expanded
    from rsa_hf.utils.text import finite_or_null

    picture = None if plot is None else writable(plot)
    model = load_checkpoint(expanded(path))
    if not is_patched(model):
        raise ValueError(f"{path} is a plain checkpoint: it has no RSA heads. Patch it first: rsa-hf patch.")
    report = rsa_report(model)
    print(json.dumps(finite_or_null(report.to_dict()), indent=2) if as_json else report)
    if picture is not None:
        from rsa_hf.plots import plot_rem

        plot_rem(report, picture)
        print(f"written: {picture}", file=sys.stderr if as_json else sys.stdout)
