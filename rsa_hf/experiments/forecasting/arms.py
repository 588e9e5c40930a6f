"""The forecasters that are compared: each family as it is, and with RSA heads, or those with P of zeros."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GPT2Config, InformerConfig

from rsa_hf.config import RSAConfig
from rsa_hf.experiments.arms import DAMPED, damp
from rsa_hf.experiments.forecasting.causal import CausalForecaster
from rsa_hf.experiments.forecasting.informer import InformerForecaster, OneShotInformer
from rsa_hf.experiments.forecasting.log_sparse import LogSparseModel
from rsa_hf.models.transformer_xl import TransformerXLConfig, TransformerXLModel
from rsa_hf.patching import patch_model

__all__ = ["ARMS", "FAMILIES", "HEADS", "Task", "make_forecaster", "rsa_plan"]

ARMS = ("plain", "rsa", DAMPED)
# `informer` has ProbSparse attention, `informer-full` all of it.
FAMILIES = ("informer", "informer-full", "log-sparse", "transformer-xl")
HEADS = 8
DROPOUT = 0.05


@dataclass(frozen=True)
class Task:
    """The lengths and widths of what a forecaster sees.

    Attributes:
        context: known steps C.
        label: those of them that an Informer's decoder is given.
        horizon: steps to be predicted, H.
        variables: N.
        time_features: F.
    """

    context: int
    label: int
    horizon: int
    variables: int
    time_features: int


def rsa_plan(family: str, dilation: int) -> RSAConfig:
    """Cyclical and dilated pairs on all heads of an Informer, dilated pairs on half of the others'; gates begin at ½.

    k = (0, 2, 2, 0, 2, 2) is the published plan of the Informer, and (0, 0, 0, 0, 2, 2) that of Transformer-XL.
    """
    undilated = 2 if family.startswith("informer") else 0
    return RSAConfig(num_cyclical_pairs=undilated, num_dilated_cyclical_pairs=2, dilation=dilation, gate_init=0.0)


def make_forecaster(
    family: str, arm: str, task: Task, *, width: int, encoder_layers: int, decoder_layers: int, dilation: int
) -> InformerForecaster | CausalForecaster:
    """A fresh forecaster, from values [B, C, N] and times [B, C + H, F] to [B, H, N].

    The weights come from torch's random state, and are the same for all arms.

    Args:
        family: one of `FAMILIES`.
        arm: one of `ARMS`.
        task: what it sees.
        width: of its states; a multiple of 8, the number of heads.
        encoder_layers: of an Informer. The others have as many layers as an Informer's encoder and decoder.
        decoder_layers: of an Informer.
        dilation: d of dilated heads.

    Raises:
        ValueError: there is no such family or arm.
    """
    if family not in FAMILIES or arm not in ARMS:
        raise ValueError(
            f"family={family!r}, arm={arm!r}: one of {', '.join(FAMILIES)} and one of {', '.join(ARMS)} are needed."
        )
    forecaster: InformerForecaster | CausalForecaster
    if family.startswith("informer"):
        body = OneShotInformer(_informer_config(family, task, width, encoder_layers, decoder_layers))
        forecaster = InformerForecaster(body, task.variables, task.label)
    else:
        layers, longest = encoder_layers + decoder_layers, task.context + task.horizon
        model = _log_sparse(width, layers, longest) if family == "log-sparse" else _transformer_xl(width, layers)
        forecaster = CausalForecaster(model, width, task.variables, task.time_features)
    if arm != "plain":
        patch_model(forecaster.body, rsa_plan(family, dilation))
    if arm == DAMPED:
        damp(forecaster.body)
    return forecaster


def _informer_config(family: str, task: Task, width: int, encoder_layers: int, decoder_layers: int) -> InformerConfig:
    config = InformerConfig(
        context_length=task.context,
        prediction_length=task.label + task.horizon,  # the length of the decoder's input
        attention_type="full" if family == "informer-full" else "prob",
        sampling_factor=5,
        distil=True,
        d_model=width,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        dropout=DROPOUT,
        attention_dropout=DROPOUT,
        activation_dropout=DROPOUT,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    # transformers makes it from lags, scales and static features, of which there are none here.
    config.feature_size = task.variables + task.time_features
    return config


def _log_sparse(width: int, layers: int, longest: int) -> LogSparseModel:
    return LogSparseModel(
        GPT2Config(
            vocab_size=1,
            n_positions=longest,
            n_embd=width,
            n_layer=layers,
            n_head=HEADS,
            resid_pdrop=DROPOUT,
            embd_pdrop=DROPOUT,
            attn_pdrop=DROPOUT,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def _transformer_xl(width: int, layers: int) -> TransformerXLModel:
    """A window is one segment, so there is no memory; what is left are its relative positions."""
    return TransformerXLModel(
        TransformerXLConfig(
            vocab_size=1,
            cutoffs=[],
            div_val=1,
            d_model=width,
            n_head=HEADS,
            d_head=width // HEADS,
            d_inner=4 * width,
            n_layer=layers,
            mem_len=0,
            clamp_len=-1,
            same_length=False,
            dropout=DROPOUT,
            dropatt=DROPOUT,
        )
    )
