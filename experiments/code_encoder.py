"""Masked language modelling of code: losses of encoders trained from scratch, which `defect` then fine-tunes.

The encoders have RoBERTa's architecture, with learned positions, and its tokenizer, cut to the tokens that occur. They
are trained on the C functions of Devign's training split and on Python's standard library (a pinned version). A seed
decides the initial weights, the order of the blocks and the masks.
"""

import functools
import json
import lzma
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

from experiments.byte_models import amount_until
from experiments.corpora import read_devign
from experiments.runner.comparison import Comparison, all_measured, compare_variants, compared, difference
from experiments.runner.experiment import Size, combinations
from experiments.runner.fit import adamw_linear_decay, default_device, evaluation_steps, fit, shuffled_rows
from experiments.runner.resources import cached, data_file
from experiments.runner.summary import Run, Settings, Values
from experiments.variants import CONVOLUTION, DEFAULT, make_variant

ARMS = ("plain", CONVOLUTION, DEFAULT)
NAMES = ("layers", "width", "heads", "length", "batch", "steps", "most")
PLANS = {  # tokens of a block, blocks of a step, steps, functions and pieces to train on
    "toy": dict(zip(NAMES, (1, 16, 2, 32, 4, 6, 40), strict=True)),
    "quick": dict(zip(NAMES, (2, 64, 4, 128, 16, 400, 4000), strict=True)),
    "small": dict(zip(NAMES, (4, 128, 4, 256, 8, 4000, 10**9), strict=True)),
    "full": dict(zip(NAMES, (4, 192, 6, 256, 16, 6000, 10**9), strict=True)),
}
RATE, MASKED, EVALUATIONS = 1e-3, 0.15, 20  # the rate of toy, and of the encoders of `defect`
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SCORED_BLOCKS = 400  # of validation functions
LOSS, RATIO, OVER_PLAIN = "nats per masked token", "tokens / plain", "nats per masked token − plain"


def make_grid(size: Size, seeds: int) -> list[Settings]:
    """Plans × variants × learning rates × seeds."""
    names = ("small", "full") if size == "full" else (size,)
    each = combinations(arm=ARMS, learning_rate=(RATE,) if size == "toy" else RATES, seed=range(seeds))
    return [{**PLANS[name], **settings} for name in names for settings in each]


@functools.lru_cache(maxsize=2)
def read_code(most: int) -> tuple[list[str], list[str]]:
    """At most so many functions and pieces of code of each language to train on, and functions to score."""
    devign = read_devign()
    python = lzma.decompress(data_file("python/train.txt.xz").read_bytes()).decode()
    train = [example.func for example in devign["train"]][:most] + python.split("\n\n\n")[:most]
    return train, [example.func for example in devign["validation"]][: max(20, most // 10)]


@functools.lru_cache(maxsize=2)
def code_tokenizer(most: int) -> Any:
    """RoBERTa's tokenizer without the tokens that the text to train on, and bytes, do not need."""
    whole = AutoTokenizer.from_pretrained(data_file("tokenizers/roberta/vocab.json").parent)
    state = json.loads(whole.backend_tokenizer.to_str())
    vocabulary, merges = state["model"]["vocab"], [tuple(merge) for merge in state["model"]["merges"]]
    parts = {a + b: (a, b) for a, b in merges}
    names = {number: token for token, number in vocabulary.items()}
    occurring = {number for ids in whole(read_code(most)[0], add_special_tokens=False)["input_ids"] for number in ids}
    needed, wanted = set(whole.all_special_tokens), [names[number] for number in occurring]
    wanted += [token for token in vocabulary if len(token) == 1]
    while wanted:
        token = wanted.pop()
        if token not in needed:
            needed.add(token)
            wanted += parts.get(token, ())
    kept = [token for token in vocabulary if token in needed]
    state["model"] |= {
        "vocab": {token: number for number, token in enumerate(kept)},
        "merges": [merge for merge in merges if "".join(merge) in needed],
    }
    for added in state["added_tokens"]:
        added["id"] = kept.index(added["content"])
    names_of = {f"{name}_token": getattr(whole, f"{name}_token") for name in ("bos", "eos", "pad", "unk", "mask")}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), **names_of, cls_token="<s>", sep_token="</s>"
    )


def in_blocks(texts: list[str], tokenizer: Any, length: int) -> Tensor:
    """Texts one after another, each ended by </s>, in blocks [N, length] that begin with <s>."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    stream = torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])
    blocks = stream[: len(stream) // (length - 1) * (length - 1)].view(-1, length - 1)
    return F.pad(blocks, (1, 0), value=tokenizer.bos_token_id)


def masked(blocks: Tensor, tokenizer: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Blocks with 15 % of their tokens hidden, and which (BERT: 80 % masks, 10 % other tokens, 10 % as they are)."""
    hidden = (torch.rand(blocks.shape, generator=generator) < MASKED) & (blocks != tokenizer.bos_token_id)
    how = torch.rand(blocks.shape, generator=generator)
    others = torch.randint(len(tokenizer), blocks.shape, generator=generator)
    shown = torch.where(hidden & (how < 0.8), tokenizer.mask_token_id, blocks)
    return torch.where(hidden & (how >= 0.9), others, shown), hidden


def masked_loss(model: Any, blocks: Tensor, tokenizer: Any, generator: torch.Generator) -> Tensor:
    """The mean loss of the hidden tokens, of which alone logits are computed."""
    shown, hidden = masked(blocks, tokenizer, generator)
    states = model.roberta(input_ids=shown.to(model.device)).last_hidden_state
    loss: Tensor = F.cross_entropy(model.lm_head(states[hidden.to(model.device)]), blocks[hidden].to(model.device))
    return loss


def make_config(settings: Settings, vocab_size: int) -> RobertaConfig:
    """The config of an encoder, without dropout."""
    return RobertaConfig(
        vocab_size=vocab_size,
        hidden_size=settings["width"],
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"],
        intermediate_size=4 * settings["width"],
        max_position_embeddings=settings["length"] + 2,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )


def build(settings: Settings, vocab_size: int) -> Any:
    """A RoBERTa with random weights, as one of `ARMS`."""
    model = RobertaForMaskedLM(make_config(settings, vocab_size))
    return make_variant(settings["arm"], model, settings["length"])


def pretrained(settings: Settings) -> Path:
    """The file of the weights and the curve of an encoder."""
    name = f"code-encoder-{settings['arm'].replace(' ', '-')}"
    return cached(name, settings, ".pt", functools.partial(_pretrain, settings))


def _pretrain(settings: Settings, path: Path) -> None:
    torch.manual_seed(settings["seed"])
    tokenizer = code_tokenizer(settings["most"])
    train, scored = (in_blocks(texts, tokenizer, settings["length"]) for texts in read_code(settings["most"]))
    scored = scored[:SCORED_BLOCKS]
    model = build(settings, len(tokenizer)).to(default_device())
    steps, batch = settings["steps"], settings["batch"]
    optimizer, schedule = adamw_linear_decay(model, settings["learning_rate"], steps)
    marks, losses = evaluation_steps(steps, EVALUATIONS), list[float]()
    order = shuffled_rows(len(train), batch, settings["seed"])

    def loss(step: int) -> Tensor:
        generator = torch.Generator().manual_seed((settings["seed"] + 1) * 10**6 + step)
        return masked_loss(model, train[next(order)], tokenizer, generator)

    def after(step: int, _: Tensor) -> None:
        if step in marks:
            losses.append(validation_loss(model, scored, tokenizer))

    fit(loss, optimizer, steps, model=model, schedule=schedule, after_step=after)
    tokens = [float(step * batch * settings["length"]) for step in sorted(marks)]
    torch.save({"model": model.state_dict(), "tokens": tokens, "losses": losses}, path)


@torch.no_grad()
def validation_loss(model: Any, blocks: Tensor, tokenizer: Any) -> float:
    """The loss on blocks, always with the same masks."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    losses = [float(masked_loss(model, some, tokenizer, generator)) * len(some) for some in blocks.split(32)]
    return sum(losses) / len(blocks)


def load_encoder(settings: Settings) -> tuple[Any, Any, dict[str, Any]]:
    """A trained encoder, its tokenizer, and what its file holds."""
    saved = torch.load(pretrained(settings), weights_only=True)
    tokenizer = code_tokenizer(settings["most"])
    model = build(settings, len(tokenizer))
    model.load_state_dict(saved["model"])
    return model, tokenizer, saved


def measure(settings: Settings) -> Values:
    """The learning curve of an encoder, which is trained if it has not been."""
    saved = torch.load(pretrained(settings), weights_only=True)
    return {LOSS: saved["losses"][-1], "tokens": saved["tokens"], "losses": saved["losses"]}


def _token_ratio(run: Run, plain: Run) -> float:
    """Tokens to the plain encoder's final loss, over all of its own; infinite if the run never gets there."""
    needed = amount_until(plain.values[LOSS], run.values["tokens"], run.values["losses"])
    return needed / float(plain.values["tokens"][-1])


COMPARISON = Comparison(
    ("layers", "width", "steps"),
    ("plain", DEFAULT),
    lambda run: float(run.values[LOSS]),
    {
        **all_measured(LOSS),
        RATIO: compared((CONVOLUTION, DEFAULT), "plain", _token_ratio),
        OVER_PLAIN: difference((CONVOLUTION, DEFAULT), "plain", LOSS),
    },
    judged=(RATIO,),
    of_arm=DEFAULT,
    even=1,
    listed=(LOSS, OVER_PLAIN),
    shown=RATIO,
    label="tokens to plain's final loss / all of plain's tokens",
    line=1,
)


EXPERIMENT = compare_variants(
    COMPARISON,
    name="code-encoder",
    claim="A bidirectional encoder of code with learned positions reaches the masked-language-modelling loss of the "
    "same encoder without RSA heads with fewer tokens.",
    published="None: the paper trains no masked language model.",
    remark="RSA heads are those of RSAConfig.from_scratch. Learning rates are searched by the loss shown, of the "
    "validation functions of Devign with the same masks.",
    seeds={"toy": 2, "quick": 2, "full": 2},
    grid=make_grid,
    measure=measure,
    parts=("steps", "arm"),
)
