"""Continuous batching: each request gets the tokens that generate() gives for its prompt alone."""

import inspect
from functools import partial

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api, initialization
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import families
import flash_stand_in
from architectures import ADAPTED, build_adapted
from broken import break_mask, ignored, without_window
from families import ATTENTIONS, FULL_PLAN, VOCAB, WINDOWED
from rsa_hf import patch_model, unpatch_model
from rsa_hf.layer import RSAHeads

STEPS = 8
PLAN = {**FULL_PLAN, "gate_init": 0.8}
patched = partial(families.patched, plan=PLAN)
FAMILIES = ["gpt2", "llama", *WINDOWED]
SMALL = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 64}

pytestmark = pytest.mark.skipif(
    "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters,
    reason="refused before transformers 5.20, whose paged cache is another: test_decoding_strategies.py",
)


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def settings():
    return GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=STEPS)


def alone(model, text):
    """The new tokens of generate(), and their log-probabilities."""
    inputs = {"input_ids": torch.tensor([text]), "attention_mask": torch.ones(1, len(text))}
    returned = {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(**inputs, **returned, generation_config=settings())
    tokens = out.sequences[0, len(text) :]
    logits = torch.cat(out.logits).log_softmax(-1)
    return tokens.tolist(), logits.gather(1, tokens[:, None])[:, 0]


def batched(model, texts, answers=1, **options):
    config, greedy = ContinuousBatchingConfig(**{**SMALL, "return_logprobs": True, **options}), settings()
    greedy.num_return_sequences = answers
    return list(model.generate_batch(texts, greedy, config).values())


def off_by(outputs, expected):
    """The largest difference of log-probabilities; infinite if a token differs."""
    assert [out.error for out in outputs] == [None] * len(expected)
    if [out.generated_tokens for out in outputs] != [tokens for tokens, _ in expected]:
        return float("inf")
    found, wanted = torch.tensor([out.logprobs for out in outputs]), torch.stack([logs for _, logs in expected])
    return float((found - wanted).abs().max())


@pytest.mark.slow_unless(attention=["sdpa"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family, attention):
    model, texts = patched(family, attention), prompts(7, 1, 21)
    expected = [alone(model, text) for text in texts]
    assert off_by(batched(model, texts), expected) <= 1e-4
    # Of a prompt with several answers the last token is held back, so a prompt of one token has no query in a step.
    twice = [each for each in expected for _ in range(2)]
    assert off_by(batched(model, texts, answers=2, allow_block_sharing=False), twice) <= 1e-4
    # Prompts are read in parts, beside requests that have one query each.
    assert off_by(batched(model, texts, max_batch_tokens=8), expected) <= 1e-4
    assert model.config._attn_implementation == attention
    unpatch_model(model)
    assert off_by(batched(model, texts), expected) == float("inf")


def anew_in_each_call(monkeypatch):
    """Forget the keys of earlier calls, which have no query in this one."""
    original = RSAHeads.forward

    def forward(self, attention, value, mask):
        has_query = (attention != 0).any(3).any(2)
        if mask.query_length < mask.key_length:
            has_query = torch.arange(mask.key_length)[None] >= mask.query_offset
        return original(self, attention, value * has_query[:, None, :, None], mask)

    monkeypatch.setattr(RSAHeads, "forward", forward)


BROKEN = [partial(break_mask, change=ignored), anew_in_each_call, partial(break_mask, change=without_window)]


@pytest.mark.parametrize(
    ("family", "broken"), [("mistral", broken) for broken in BROKEN] + [("llama", broken) for broken in BROKEN[:2]]
)
def test_broken_recurrences_change_tokens(family, broken, monkeypatch):
    model, texts = patched(family), prompts(7, 21, 1)
    expected = [alone(model, text) for text in texts]
    broken(monkeypatch)
    assert off_by(batched(model, texts, max_batch_tokens=8), expected) == float("inf")


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prefixes_are_shared(family, share):
    model, shared = patched(family), prompts(16)[0]
    texts = [shared + text for text in prompts(6, 3, 9)]
    expected = [alone(model, text)[0] for text in texts]
    read, found = [], []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].numel()))
    config = ContinuousBatchingConfig(**SMALL, allow_block_sharing=share)
    with model.continuous_batching_context_manager(settings(), continuous_batching_config=config) as manager:
        for text in texts:
            manager.add_request(text, max_new_tokens=STEPS, eos_token_id=-1)
            found.append(manager.get_result(timeout=60).generated_tokens)
    hook.remove()
    assert found == expected
    assert sum(read) == sum(map(len, texts)) + len(texts) * (STEPS - 1) - (2 * len(shared) if share else 0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_persistent_cache_ends_with_the_heads_that_filled_it(family):
    model, texts, config = patched(family), prompts(24), ContinuousBatchingConfig(**SMALL)

    def persistent():
        (out,) = model.generate_batch(texts, settings(), config, persistent_manager=True).values()
        return out.generated_tokens

    with_heads = alone(model, texts[0])[0]
    assert persistent() == persistent() == with_heads
    unpatch_model(model)
    assert persistent() == alone(model, texts[0])[0] != with_heads
    patch_model(model, PLAN)
    assert persistent() == alone(model, texts[0])[0]
    model.destroy_cached_continuous_batching_manager()


# --- refused --------------------------------------------------------------------------------------------------------


def test_flash_attention_is_refused_before_the_thread_starts(monkeypatch):
    flash_stand_in.install(monkeypatch)
    model = patched("llama", "flash_attention_2")
    for call in (lambda: batched(model, prompts(5)), model.init_continuous_batching):
        with pytest.raises(NotImplementedError, match="flash attention.*sdpa.*generate"):
            call()
    assert model.config._attn_implementation == "flash_attention_2"


def test_models_do_not_switch_to_flash_attention_or_graphs(monkeypatch):
    flash_stand_in.install(monkeypatch)
    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **_: True)
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: False)
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "cuda")
    model = patched("llama")

    def chosen(config):
        manager = model.init_continuous_batching(settings(), config)
        return model.config._attn_implementation, any(manager.continuous_batching_config.cuda_graph_booleans)

    graphs, padded = ContinuousBatchingConfig(use_cuda_graph=True), ContinuousBatchingConfig(q_padding_interval_size=8)
    assert [chosen(config) for config in (None, graphs, padded)] == [("sdpa", False)] * 3
    assert graphs.use_cuda_graph is True
    unpatch_model(model)
    assert chosen(None) == ("flash_attention_2", True)


@pytest.mark.parametrize(
    "name", sorted({"bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt", "xglm"} & set(ADAPTED))
)
def test_classes_that_bypass_the_paged_cache_are_refused(name):
    model = patch_model(build_adapted(name, language_model=True), PLAN)
    with pytest.raises(NotImplementedError, match="without the paged cache.*generate"):
        batched(model, prompts(5, 7))
