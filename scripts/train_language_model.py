"""Train a causal language model with RSA heads, in a plain Accelerate loop that is meant to be read and copied.

It follows transformers' run_clm_no_trainer.py; comments that begin with `RSA:` mark what RSA adds.

    accelerate launch scripts/train_language_model.py --model_name_or_path gpt2 --output_dir outputs/gpt2 \
        --dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-raw-v1
    accelerate launch scripts/train_language_model.py --config_name small/config.json --tokenizer_name gpt2 \
        --train_file a.txt --validation_file b.txt --rsa from_scratch --output_dir outputs/small
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
from datasets import DatasetDict, load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler

from rsa_hf import RSAConfig, param_groups, patch_model, rsa_report
from rsa_hf.training import load_tokenizer, require_causal, shard_rsa_heads


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--model_name_or_path", help="a pretrained model: a folder or a name on the Hub")
    start.add_argument("--config_name", help="or, with --tokenizer_name, a model's config, for random weights")
    add("--tokenizer_name", help="default: the model's own")
    add("--rsa", default="default", help="RSAConfig as JSON, default, from_scratch, or none: the model as it is")
    add("--rsa_learning_rate", type=float, help="of gates and rates; default: parameter_scale x learning_rate")
    add("--dataset_name", help="a data set on the Hub with splits train and validation")
    add("--dataset_config_name", help="which of its configurations")
    add("--train_file", help="or a text, JSON lines, or CSV; may be compressed")
    add("--validation_file", help="likewise")
    add("--text_column_name", default="text", help="where JSON lines or the data set have their text")
    add("--block_size", type=int, help="tokens of an example; default: what the model takes, at most 1024")
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
    tokenizer = load_tokenizer(args.tokenizer_name or args.model_name_or_path)
    if args.model_name_or_path:  # in float32; `accelerate launch --mixed_precision bf16` computes in bfloat16
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    else:
        of_tokenizer = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config_name, **of_tokenizer))
    require_causal(model)  # an encoder would see the tokens that it predicts
    if args.rsa != "none":  # RSA: before the optimiser is made
        named = {"default": RSAConfig(), "from_scratch": RSAConfig.from_scratch()}
        patch_model(model, named[args.rsa] if args.rsa in named else json.loads(args.rsa))
    return model, tokenizer


def load_blocks(args, tokenizer, block_size):
    if args.dataset_name:
        texts = load_dataset(args.dataset_name, args.dataset_config_name).select_columns(args.text_column_name)
    else:
        texts = DatasetDict()
        for split, file in {"train": args.train_file, "validation": args.validation_file}.items():
            kind = next((kind for kind in ("json", "csv") if f".{kind}" in Path(file).name), "text")
            texts[split] = load_dataset(kind, data_files=file, split="train").select_columns(args.text_column_name)

    def group(rows):
        documents = [text.removesuffix("\n") + "\n" for text in rows[args.text_column_name]]
        ids = list(itertools.chain(*tokenizer(documents)["input_ids"]))
        return {"input_ids": [ids[i : i + block_size] for i in range(0, len(ids) - block_size + 1, block_size)]}

    return texts.map(group, batched=True, remove_columns=args.text_column_name).with_format("torch")


def token_losses(model, ids):
    """The loss of every token but the first of each block, of shape (B, T - 1)."""
    logits, labels = model(input_ids=ids).logits[:, :-1].float(), ids[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    losses = [accelerator.gather_for_metrics(token_losses(model, batch["input_ids"])) for batch in loader]
    loss = torch.cat(losses).double().mean()
    scalars = rsa_report(accelerator.unwrap_model(model)).scalars()  # RSA: under FSDP2, every process calls it
    return {"eval_loss": loss.item(), "perplexity": loss.exp().item(), **scalars}


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
    longest = min(1024, tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 1024))
    with accelerator.main_process_first():  # the others find the result in the cache
        blocks = load_blocks(args, tokenizer, args.block_size or longest)
    # A batch is one optimiser step, cut into micro-batches below. The global generator, which is saved, is of dropout.
    step_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    train_loader = DataLoader(blocks["train"], step_size, shuffle=True, drop_last=True, generator=torch.Generator())
    eval_loader = DataLoader(blocks["validation"], args.per_device_eval_batch_size, generator=torch.Generator())
    shard_rsa_heads(model, accelerator)  # RSA: keeps gates and rates in float32 under FSDP2
    # RSA: gates and rates have no weight decay, and can have their own learning rate.
    optimizer = torch.optim.AdamW(param_groups(model, args.learning_rate, args.weight_decay, args.rsa_learning_rate))
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    if not (len(train_loader) and len(eval_loader)):
        raise ValueError(f"{len(blocks['train'])} training and {len(blocks['validation'])} validation blocks: too few")
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
    accelerator.init_trackers("train_language_model", vars(args) | {"output_dir": str(args.output_dir)})
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
            step_loss, parts = 0.0, batch["input_ids"].split(args.per_device_train_batch_size)
            for i, ids in enumerate(parts):
                # All parts have equally many tokens, so the mean over parts and processes is the mean over all tokens.
                with accelerator.no_sync(model) if i < len(parts) - 1 else contextlib.nullcontext():
                    loss = token_losses(model, ids).mean() / len(parts)
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
