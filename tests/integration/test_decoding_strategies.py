"""Every strategy of `generate()`, against a loop that reads the whole text again for every token."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    StaticCache,
)
from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from broken import break_mask, farthest, forgets_the_offset
from families import (
    ATTENTIONS,
    DECODERS,
    ENCODER_DECODERS,
    FULL_PLAN,
    MORE_CONFIGS,
    VOCAB,
    WINDOWED,
    build_language_model,
    patched,
    tiny_config,
    tokens,
    widen,
)
from rsa_hf import patch_model, unpatch_model
from texts import CACHES, PIECES, difference, padded, padded_batch, positions, uncached

LENGTH, STEPS = 11, 9
GREEDY = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
SPECULATIVE = {"prompt lookup", "assisted"}
COMPILED = [*(family for family in DECODERS if family != "gpt2"), *WINDOWED, "t5"]


def prompt(rows=3):
    """Rows with left padding, whose text repeats itself, so that prompt lookup finds something."""
    ids = torch.randint(3, VOCAB, (rows, 4)).repeat(1, 3)[:, :LENGTH]
    batch = padded(ids, (3,))
    del batch["position_ids"]
    return batch


def read_anew(model, inputs, written):
    """The logits of an uncached forward for the prompt and all that was written."""
    if model.config.is_encoder_decoder:
        return uncached(model, {**inputs, "decoder_input_ids": written})
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, written.shape[1] - LENGTH), value=1)
    return uncached(model, {"input_ids": written, "attention_mask": mask, "position_ids": positions(mask)})


def greedy_loop(model, inputs):
    """Tokens [B, STEPS] and logits [B, STEPS, V] of greedy decoding, with an uncached forward per token."""
    written, logits = inputs["input_ids"], []
    if model.config.is_encoder_decoder:
        written = torch.full((len(written), 1), model.config.decoder_start_token_id)
    for _ in range(STEPS):
        last = read_anew(model, inputs, written)[:, -1].clone()
        last[:, model.config.eos_token_id] = -torch.inf
        logits.append(last)
        written = torch.cat([written, last.argmax(-1, keepdim=True)], 1)
    return written[:, -STEPS:], torch.stack(logits, 1)


def off_by(model, inputs, expected, arguments):
    """The largest difference in logits between generate() and the loop; infinite for another token."""
    out = model.generate(**inputs, **GREEDY, **arguments, output_scores=True, return_dict_in_generate=True)
    tokens, logits = expected
    if not torch.equal(out.sequences[:, -STEPS:], tokens):
        return float("inf")
    scores = torch.stack(out.scores, 1)
    finite = logits.isfinite() & scores.isfinite()
    return float((scores - logits)[finite].abs().max())


EVERY_DECODER = [*DECODERS, *WINDOWED]
CASES = [
    *((strategy, family) for strategy in ("dynamic", "static") for family in [*EVERY_DECODER, *ENCODER_DECODERS]),
    *(("chunked prefill", family) for family in EVERY_DECODER),
    *(("chunked prefill, static", family) for family in EVERY_DECODER),
    *(("prompt lookup", family) for family in EVERY_DECODER),
    *(("assisted", family) for family in [*EVERY_DECODER, *ENCODER_DECODERS]),
]
EAGER = [case for case in CASES if case[0] in ("static", "chunked prefill")]


def arguments_of(strategy, family):
    if strategy == "assisted":
        # Most drafts of another model are refused, so the cache is cropped again and again.
        return {"assistant_model": patched(family, seed=5)}
    return {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "chunked prefill": {"prefill_chunk_size": 4},
        "chunked prefill, static": {"prefill_chunk_size": 4, "cache_implementation": "static"},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
    }[strategy]


@pytest.mark.parametrize(
    ("strategy", "family", "attention"), [*((*case, "sdpa") for case in CASES), *((*case, "eager") for case in EAGER)]
)
@torch.no_grad()
def test_each_strategy_writes_what_a_loop_without_cache_writes(strategy, family, attention, monkeypatch):
    model, arguments = patched(family, attention), arguments_of(strategy, family)
    inputs = prompt(1 if strategy in SPECULATIVE else 3)
    expected = greedy_loop(model, inputs)
    assert off_by(model, inputs, expected, arguments) <= 2e-5
    break_mask(monkeypatch, forgets_the_offset)
    assert off_by(model, inputs, expected, arguments) > 1e-3


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", [*DECODERS, *WINDOWED, *ENCODER_DECODERS])
@torch.no_grad()
def test_beam_search_scores_a_text_as_an_uncached_forward_does(family, cache, monkeypatch):
    model, inputs = patched(family), prompt()
    arguments = {**GREEDY, "num_beams": 3, "length_penalty": 0.0}
    if cache == "static":
        arguments["cache_implementation"] = "static"

    def gap():
        out = model.generate(**inputs, **arguments, output_scores=True, return_dict_in_generate=True)
        likely = read_anew(model, inputs, out.sequences).log_softmax(-1)
        scores = likely[:, -STEPS - 1 : -1].gather(2, out.sequences[:, -STEPS:, None]).sum((1, 2))
        return float((scores - out.sequences_scores).abs().max())

    assert gap() <= 2e-4
    plain = model.generate(**inputs, **{**arguments, "cache_implementation": None}, use_cache=False)
    assert torch.equal(model.generate(**inputs, **arguments), plain)
    break_mask(monkeypatch, forgets_the_offset)
    assert gap() > 1e-3


@pytest.mark.slow_unless(family=["gpt2"])
@pytest.mark.parametrize("family", ["gpt2", *COMPILED])
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_compiled_decoding_agrees_and_takes_as_many_graphs_as_the_plain_model(family, monkeypatch):
    inputs = prompt()

    def compiled(model, expected):
        """The difference from the loop, and the number of compiled graphs."""
        graphs = []
        options = CompileConfig(backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True, mode=None)
        options._compile_all_devices = True  # by default, generate() compiles only on a GPU
        torch._dynamo.reset()
        gap = off_by(model, inputs, expected, {"cache_implementation": "static", "compile_config": options})
        torch._dynamo.reset()
        return gap, len(graphs)

    model, plain = patched(family), unpatch_model(patched(family))
    expected = greedy_loop(model, inputs)
    gap, graphs = compiled(model, expected)
    assert gap <= 2e-5
    assert graphs == compiled(plain, greedy_loop(plain, inputs))[1] > 0
    break_mask(monkeypatch, forgets_the_offset)
    assert compiled(model, expected)[0] > 1e-3


def test_continuous_batching_of_an_earlier_transformers_is_refused(monkeypatch):
    model = patched("llama")
    monkeypatch.setattr(PagedAttentionCache, "update", lambda self, key_states, value_states, layer_idx, read_index: 0)
    with pytest.raises(NotImplementedError, match=r"needs transformers 5\.20 or newer"):
        model.generate_batch([[3, 4, 5]], max_new_tokens=2)
    assert type(unpatch_model(model).init_continuous_batching()).__name__ == "ContinuousBatchingManager"


# --- masks of other kinds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@torch.no_grad()
def test_sdpa_registered_under_another_name_keeps_its_alignment(cache, register_attention):
    # As transformers' documentation registers attention functions. Without padding, the first tokens of a static cache
    # come without a mask, which then has the alignment of sdpa.
    register_attention("own_sdpa", AttentionInterface()["sdpa"])
    model = patch_model(build_language_model("llama", "own_sdpa"), FULL_PLAN)
    inputs = {name: rows[2:] for name, rows in padded_batch().items()}
    assert difference(model, inputs, PIECES["cached"], CACHES[cache](model)) <= 1e-5


@pytest.mark.parametrize("family", [*DECODERS, *WINDOWED])
@pytest.mark.parametrize("length", [2, 4, 9])
@torch.no_grad()
def test_one_token_in_a_chunk_with_right_padding_agrees_with_the_whole_text(family, length, monkeypatch):
    model, pieces = patched(family), [LENGTH - length, length]
    inputs = padded(tokens(3, LENGTH), [length - 1] * 3, "right")
    assert difference(model, inputs, pieces, CACHES["dynamic"](model)) <= 1e-5
    break_mask(monkeypatch, forgets_the_offset)
    assert difference(model, inputs, pieces, CACHES["dynamic"](model)) > 1e-3


@pytest.mark.filterwarnings("ignore:unsupported mask")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_tokens_of_an_image_that_see_ahead_agree_with_and_without_a_cache(attention, cache, monkeypatch):
    """A prompt of Gemma 3 with images, whose tokens see all of their image. Text is causal."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=MORE_CONFIGS["gemma3"]().to_dict(),
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
    )
    model = widen(Gemma3ForConditionalGeneration._from_config(config, attn_implementation=attention))
    patch_model(model, FULL_PLAN)
    inputs = padded_batch()
    del inputs["position_ids"]
    real, images = inputs["attention_mask"].bool(), torch.zeros_like(inputs["input_ids"])
    images[:, 5:9], images[0, 11:13] = 1, 1
    expected = uncached(model, {**inputs, "token_type_ids": images})

    def gap():
        past = CACHES[cache](model.base_model.language_model)
        found = model(**inputs, token_type_ids=images, past_key_values=past).logits
        return float((found - expected)[real].abs().max())

    assert gap() <= 1e-5
    assert float((uncached(model, inputs) - expected)[real].abs().max()) > 1e-2  # images do see ahead
    if cache == "static":
        monkeypatch.setattr("rsa_hf.ops.read_mask.query_position", farthest)
        with pytest.raises(ValueError, match=r"position 0 .* slot 3 "):
            gap()


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("padding", [0, 2])
@torch.no_grad()
def test_positions_tell_a_block_that_sees_itself_from_a_token_and_padding(window, padding, monkeypatch):
    model = widen(AutoModelForCausalLM.from_config(tiny_config("mistral", sliding_window=window)))
    model, ids = patch_model(model, FULL_PLAN), tokens(1, 8)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    mask[4:, 4:], mask[:, :padding] = True, False
    expected = model(ids, attention_mask=mask[None, None]).logits[:, 4:]

    def error(slots):
        cache = StaticCache(config=model.config, max_cache_len=slots)
        model(ids[:, :4], past_key_values=cache, attention_mask=(torch.arange(4) >= padding)[None])
        seen = torch.arange(slots).sub(padding).ge(0) & (torch.arange(slots) < 8)
        found = model(ids[:, 4:], past_key_values=cache, attention_mask=seen.expand(1, 1, 4, -1)).logits
        return float((found - expected).abs().max())

    assert max(error(11), error(14)) < 1e-5
    monkeypatch.setattr("rsa_hf.integration.attention.start_of_queries", lambda *_: None)
    with pytest.raises((ValueError, AssertionError)):  # refused without a window
        assert error(11) < 1e-2
