"""`rsa-hf calibrate`."""

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

import typer

from rsa_hf.cli.common import install_hooks, load_checkpoint, task_module
from rsa_hf.cli.patch import new_folder, save_tokenizer
from rsa_hf.utils.locate import expanded

ROWS_PER_BATCH = 4


def calibrate(
    base: Annotated[
        str, typer.Argument(help="A language model's name on the Hub, its folder, or package:NAME/FOLDER.")
    ],
    out: Annotated[str, typer.Argument(help="Folder for the patched checkpoint; new or empty.")],
    text: Annotated[
        str | None, typer.Option(help="A text file of the kind that the model is for; its first 8 MiB are read.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="In place of a text: the YAML file of a run, for its training data.")
    ] = None,
    task: Annotated[Literal["lm", "defect"], typer.Option(help="The task of the run.")] = "lm",
    max_rows: Annotated[int, typer.Option(help="Largest number of rows to read.")] = 64,
    block_size: Annotated[int, typer.Option(help="Tokens of a row of the text.")] = 256,
    gate_passes: Annotated[
        int, typer.Option(help="Passes that move the gates. More take longer, and open gates wider where that helps.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Random seed, of the rows and of the choice.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into OUT even if it holds files.")] = False,
) -> None:
    """Put RSA heads where they help a pretrained model on a text or on the data of a run, and save it if they do.

    Only the gates are trained. OUT gets the patched model, its tokenizer, a model card, and what was found:
    calibration.json and, with matplotlib, calibration.png. Nothing is written if no gain can be shown on held-out
    rows.

    Example: rsa-hf calibrate openai-community/gpt2 outputs/gpt2-calibrated --text corpus.txt
    """
    if (text is None) == (config is None):
        raise ValueError("calibrate needs data: either --text FILE, or --config FILE of a run.")
    base, folder = expanded(base), new_folder(out, overwrite)
    install_hooks()
    from torch.utils.data import default_collate

    from rsa_hf.calibration import run_calibration
    from rsa_hf.hub import write_card
    from rsa_hf.patching import patch_model
    from rsa_hf.training.model_setup import calibration_batches

    if text is not None:
        model = load_checkpoint(base)
        train_rows, collate = _blocks_of(model, base, text, block_size), default_collate
    else:
        settings = [expanded(str(config)), "--model_name_or_path", base, "--rsa", "none"]
        model, train_rows, collate = task_module(task).plain_model_and_rows(settings)
    batches = calibration_batches(train_rows, collate, max_rows, ROWS_PER_BATCH, seed)
    found = run_calibration(model, batches, max_rows=max_rows, gate_passes=gate_passes, seed=seed)
    print(found)
    if not found.heads:
        print(f"nothing is written to {folder}")
        return
    patch_model(model, found.config)
    model.save_pretrained(folder)
    save_tokenizer(base, folder)
    (folder / "calibration.json").write_text(json.dumps(found.to_dict(), indent=2), encoding="utf-8")
    write_card(model, folder, base_model=base, scores={"calibration": found.scores}, seed=seed)
    with suppress(ImportError):  # no matplotlib
        found.plot(folder / "calibration.png")
    print(f"written: {folder}")


def _blocks_of(model: Any, base: str, text: str, block_size: int) -> Any:
    """The blocks of a text file, tokenized for a language model."""
    from rsa_hf.tasks.text_blocks import TrainingBlocks
    from rsa_hf.tasks.text_data import LanguageModelingDataConfig, read_texts
    from rsa_hf.training.model_setup import load_tokenizer, require_inputs_fit

    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(
            f"{base} is a {type(model).__name__}: --text is for causal language models, which predict the next token. "
            "Give --config and --task for another."
        )
    content = read_texts(LanguageModelingDataConfig(test_file=expanded(text), max_eval_bytes=2**23), "test")["test"]
    tokenizer = load_tokenizer(base)
    try:
        ids = tokenizer(content.decode(), return_tensors="pt", verbose=False).input_ids[0]
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is not in UTF-8 ({error}). Convert it.") from error
    if not 2 <= block_size <= len(ids):
        raise ValueError(f"--block-size={block_size}: from 2 to {len(ids)}, the tokens of {text}, is needed.")
    require_inputs_fit(model, tokenizer, block_size, "--block-size")
    return TrainingBlocks(ids, block_size)
