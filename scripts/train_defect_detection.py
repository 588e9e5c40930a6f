"""Train a detector of defective functions with RSA heads, in a plain Accelerate loop that is meant to be copied.

It follows transformers' run_glue_no_trainer.py; comments that begin with `RSA:` mark what RSA adds. The data are JSON
lines with `func`, the source code of a function, and `target`, 1 for a defective one, as in Devign (CodeXGLUE).

    accelerate launch scripts/train_defect_detection.py --model_name_or_path microsoft/codebert-base \
        --dataset_name google/code_x_glue_cc_defect_detection --output_dir outputs/codebert
    accelerate launch scripts/train_defect_detection.py --model_name_or_path microsoft/codebert-base --rsa none \
        --train_file train.jsonl --validation_file valid.jsonl --output_dir outputs/plain
"""

import argparse
import contextlib
import itertools
import json
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from datasets import load_dataset
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification, DataCollatorWithPadding, get_scheduler

from rsa_hf import param_groups, patch_model, rsa_report
from rsa_hf.training import load_tokenizer, shard_rsa_heads


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", required=True, help="a pretrained model: a folder or a name on the Hub")
    add("--tokenizer_name", help="default: the model's own")
    add("--rsa", default="default", help="RSAConfig as JSON; 'default': RSAConfig(); 'none': the model as it is")
    add("--rsa_learning_rate", type=float, help="of gates and rates; default: parameter_scale x learning_rate")
    add("--dataset_name", help="a data set on the Hub with splits train and validation")
    add("--dataset_config_name", help="which of its configurations")
    add("--train_file", help="or JSON lines; may be compressed")
    add("--validation_file", help="in the same format")
    add("--max_length", type=int, default=512, help="tokens of a function; longer ones are truncated")
    add("--per_device_train_batch_size", type=int, default=8)
    add("--per_device_eval_batch_size", type=int, default=8)
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--learning_rate", type=float, default=5e-5)
    add("--weight_decay", type=float, default=0.0)
    add("--num_train_epochs", type=int, default=3)
    add("--max_train_steps", type=int, help="optimiser steps, instead of --num_train_epochs")
    add("--lr_scheduler_type", default="linear")
    add("--num_warmup_steps", type=int, default=0)
    add("--output_dir", type=Path, required=True)
    add("--seed", type=int, default=0)
    add("--checkpointing_steps", default="epoch", help="a number of steps, or 'epoch'")
    add("--resume_from_checkpoint", help="a checkpoint; 'latest': the newest in --output_dir, if any")
    add("--report_to", help="a tracker, such as tensorboard or wandb, or all that are installed: all")
    args = parser.parse_args()
    if not args.resume_from_checkpoint and any(args.output_dir.glob("step_*")):
        parser.error(f"{args.output_dir} has checkpoints: give --resume_from_checkpoint or another --output_dir")
    if not args.dataset_name and not (args.train_file and args.validation_file):
        parser.error("give --dataset_name, or --train_file and --validation_file")
    return args


def load_model(args):
    tokenizer = load_tokenizer(args.tokenizer_name or args.model_name_or_path, split_special_tokens=True)
    load = AutoModelForSequenceClassification.from_pretrained  # float32, under --mixed_precision bf16 too
    model = load(args.model_name_or_path, num_labels=2, dtype=torch.float32)
    if tokenizer.pad_token is None:  # many decoders
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = args.max_length  # pipelines with truncation=True cut to this
    model.config.defect_detection = {"max_seq_length": args.max_length}  # and so do rsa-hf predict and evaluate
    if args.rsa != "none":  # RSA: before the optimiser is made
        patch_model(model, None if args.rsa == "default" else json.loads(args.rsa))
    return model, tokenizer


def load_functions(args, tokenizer):
    if args.dataset_name:
        functions = load_dataset(args.dataset_name, args.dataset_config_name)
    else:
        functions = load_dataset("json", data_files={"train": args.train_file, "validation": args.validation_file})

    def encode(rows):
        labels = [{0: 0, 1: 1, "0": 0, "1": 1}[target] for target in rows["target"]]  # others are a KeyError
        return {**tokenizer(rows["func"], truncation=True), "labels": labels}

    return functions.map(encode, batched=True, remove_columns=functions["train"].column_names)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    predictions, labels = [], []
    for batch in loader:
        # gather_for_metrics drops the functions that are repeated to give every process the same number.
        both = accelerator.gather_for_metrics((model(**batch).logits.argmax(-1), batch["labels"]))
        predictions += both[0].tolist()
        labels += both[1].tolist()
    metrics = {"accuracy": accuracy_score, "f1": f1_score, "mcc": matthews_corrcoef}
    scores = {name: float(metric(labels, predictions)) for name, metric in metrics.items()}
    # RSA: a few numbers on gates and rates; under FSDP2, every process has to call it.
    return {**scores, **rsa_report(accelerator.unwrap_model(model)).scalars()}


def save_checkpoint(accelerator, model, folder):
    """Write under another name, then rename: a run that is killed meanwhile leaves no incomplete `step_*`."""
    unfinished = folder.with_name(f"unfinished_{folder.name}")
    accelerator.save_state(unfinished)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).config.save_pretrained(unfinished)  # RSA: with the plan of its heads
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def main():
    args = parse_args()
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # otherwise processes without a GPU do not find each other
        log_with=args.report_to,
        project_dir=args.output_dir,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),  # for resuming
        step_scheduler_with_optimizer=False,  # otherwise Accelerate steps the scheduler once for each process
    )
    set_seed(args.seed)
    model, tokenizer = load_model(args)
    with accelerator.main_process_first():  # the others find the result in the cache
        functions = load_functions(args, tokenizer)
    # A batch is one optimiser step, cut into micro-batches below. The global generator, which is saved, is of dropout.
    step_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    pad = DataCollatorWithPadding(tokenizer)

    def loader(split, size, **order):
        return DataLoader(functions[split], size, collate_fn=pad, generator=torch.Generator(), **order)

    train_loader = loader("train", step_size, shuffle=True, drop_last=True)
    eval_loader = loader("validation", args.per_device_eval_batch_size)
    shard_rsa_heads(model, accelerator)  # RSA: keeps gates and rates in float32 under FSDP2
    # RSA: gates and rates have no weight decay, and can have their own learning rate.
    optimizer = torch.optim.AdamW(param_groups(model, args.learning_rate, args.weight_decay, args.rsa_learning_rate))
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    if not len(train_loader):
        raise ValueError(f"{len(functions['train'])} training functions are too few for one step")
    max_steps = args.max_train_steps or args.num_train_epochs * len(train_loader)
    scheduler = accelerator.prepare(get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, max_steps))
    set_seed(args.seed, device_specific=True)  # each process draws its own dropout
    step, checkpoint = 0, args.resume_from_checkpoint
    if checkpoint == "latest":
        checkpoint = max(args.output_dir.glob("step_*"), key=lambda path: int(path.name[5:]), default=None)
    if checkpoint:
        saved, config = AutoConfig.from_pretrained(checkpoint), accelerator.unwrap_model(model).config
        if getattr(saved, "rsa", None) != getattr(config, "rsa", None):  # RSA: its numbers would mean something else
            raise ValueError(f"{checkpoint} has other RSA heads than this run. Give the --rsa that it was made with.")
        accelerator.load_state(checkpoint)
        step = int(Path(checkpoint).name.removeprefix("step_"))
    every = len(train_loader) if args.checkpointing_steps == "epoch" else int(args.checkpointing_steps)
    accelerator.init_trackers("train_defect_detection", vars(args) | {"output_dir": str(args.output_dir)})
    progress = tqdm(total=max_steps, initial=step, disable=not accelerator.is_main_process)
    while True:
        results = evaluate(accelerator, model, eval_loader)
        accelerator.log(results, step)
        accelerator.print(f"step {step}:", {k: round(v, 4) for k, v in results.items() if "layer" not in k})
        if step >= max_steps:
            break
        model.train()
        epoch, done = divmod(step, len(train_loader))
        train_loader.set_epoch(epoch)
        for batch in itertools.islice(accelerator.skip_first_batches(train_loader, done), max_steps - step):
            step_loss, size = 0.0, args.per_device_train_batch_size
            for start in range(0, step_size, size):
                part = {name: value[start : start + size] for name, value in batch.items()}
                # All parts have equally many functions, so the mean over parts and processes is the mean over all.
                with accelerator.no_sync(model) if start + size < step_size else contextlib.nullcontext():
                    loss = model(**part).loss / args.gradient_accumulation_steps
                    accelerator.backward(loss)
                step_loss += loss.detach()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            step_loss = accelerator.reduce(step_loss, "mean").item()
            accelerator.log({"train_loss": step_loss, "learning_rate": scheduler.get_last_lr()[0]}, step)
            progress.update()
            if step % every == 0:
                save_checkpoint(accelerator, model, args.output_dir / f"step_{step}")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=state)
        tokenizer.save_pretrained(args.output_dir)
        (args.output_dir / "all_results.json").write_text(json.dumps(results, indent=2))
    model, optimizer = accelerator.free_memory(model, optimizer)  # DDP must go before its process group
    accelerator.end_training()


if __name__ == "__main__":
    main()
