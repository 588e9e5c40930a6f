"""transformers' common model tests on GPT-2, RoBERTa and Llama: what they need to be told of each."""

import unittest
from typing import Any

import torch
import transformers
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from transformers import GPT2Config, GPT2DoubleHeadsModel, LlamaConfig, PreTrainedConfig, RobertaConfig

VOCAB = 99
CLASSIFIERS = ("ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification")


def classes(family: str, *heads: str) -> tuple[type[Any], ...]:
    """The model of a family without a head, and with these."""
    return tuple(getattr(transformers, f"{family}{head}") for head in ("Model", *heads))


class Tester:
    """A tiny model and a batch for it, in the form that the common tests ask for."""

    batch_size = 5
    seq_length = 7
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32
    num_choices = 3
    is_training = True

    def __init__(self, config_class: type[PreTrainedConfig], **more: Any) -> None:
        self.config_class, self.more = config_class, more

    def get_config(self) -> PreTrainedConfig:
        return self.config_class(
            vocab_size=VOCAB,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=64,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=3,
            **self.more,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        ids = ids_tensor(shape, VOCAB - 4) + 4  # no special tokens
        return self.get_config(), {"input_ids": ids, "attention_mask": random_attention_mask(shape)}


class GPT2Tests(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    model_tester = Tester(GPT2Config, n_inner=64)
    all_model_classes = classes("GPT2", "LMHeadModel", "DoubleHeadsModel", *CLASSIFIERS)
    test_all_params_have_gradient = False  # the second head of GPT2DoubleHeadsModel has a loss of its own

    def _prepare_for_class(self, inputs: dict[str, Any], model_class: type, return_labels: bool = False) -> Any:
        inputs = super()._prepare_for_class(inputs, model_class, return_labels)
        if return_labels and model_class is GPT2DoubleHeadsModel:
            choices = (self.model_tester.batch_size, self.model_tester.num_choices)
            inputs["input_ids"] = inputs["input_ids"][:, None].expand(*choices, -1).contiguous()
            inputs["labels"] = inputs["input_ids"]
            inputs["mc_token_ids"] = torch.zeros(choices, dtype=torch.long)
            inputs["mc_labels"] = torch.zeros(len(inputs["input_ids"]), dtype=torch.long)
            del inputs["attention_mask"]
        return inputs


class RobertaTests(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    model_tester = Tester(RobertaConfig, intermediate_size=64, type_vocab_size=1)
    all_model_classes = classes("Roberta", "ForCausalLM", "ForMaskedLM", "ForMultipleChoice", *CLASSIFIERS)


class LlamaTests(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    model_tester = Tester(LlamaConfig, intermediate_size=64, num_key_value_heads=2)
    all_model_classes = classes("Llama", "ForCausalLM", *CLASSIFIERS)
