"""Adaptive embedding and softmax (Baevski and Auli, 2019, arXiv:1809.10853; Grave et al., 2017).

Tokens are sorted by frequency and cut into bands. With `div_val` > 1, band i has embeddings of width d_embed /
div_val^i, projected to the model's width. The softmax is first over the first band and one entry for each other band,
then within that band.
"""

import itertools
import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rsa_hf.models.transformer_xl.configuration_transformer_xl import TransformerXLConfig


class Bands:
    """Which tokens form a band, the size and width of each table of embeddings, and whether they are projected."""

    def __init__(self, config: TransformerXLConfig) -> None:
        self.ranges = list(itertools.pairwise([0, *config.cutoffs, config.vocab_size]))
        width = config.embedding_width
        self.one_table = config.div_val == 1  # for all bands
        self.tables = [(b - a, width // config.div_val**i) for i, (a, b) in enumerate(self.ranges)]
        if self.one_table:
            self.tables = [(config.vocab_size, width)]
        self.projected = not self.one_table or width != config.d_model

    def __len__(self) -> int:
        return len(self.ranges)

    def of(self, tokens: Tensor) -> Tensor:
        """The band of each token, in the shape of `tokens`; a token outside the vocabulary is in an outer band."""
        starts = torch.tensor([start for start, _ in self.ranges[1:]], dtype=tokens.dtype, device=tokens.device)
        return torch.bucketize(tokens.contiguous(), starts, right=True)


class AdaptiveEmbedding(nn.Module):
    """Embeddings, projected to the model's width and scaled by √d_model."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.bands = Bands(config)
        self.width, self.scale = config.d_model, math.sqrt(config.d_model)
        self.emb_layers = nn.ModuleList(nn.Embedding(size, width) for size, width in self.bands.tables)
        widths = [width for _, width in self.bands.tables] if self.bands.projected else []
        self.emb_projs = nn.ParameterList(nn.Parameter(torch.empty(config.d_model, width)) for width in widths)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] → [B, T, d_model]."""
        if len(self.bands.tables) == 1:
            embedded: Tensor = self.emb_layers[0](tokens)
            if self.bands.projected:
                embedded = F.linear(embedded, self.emb_projs[0])
            return embedded * self.scale
        band = self.bands.of(tokens)
        embedded = self.emb_projs[0].new_zeros(*tokens.shape, self.width)
        for i, (start, _) in enumerate(self.bands.ranges):
            at = band == i
            projected = F.linear(self.emb_layers[i](tokens[at] - start), self.emb_projs[i])
            embedded[at] = projected.to(embedded.dtype)
        return embedded * self.scale


class AdaptiveLogSoftmax(nn.Module):
    """Log-probabilities of all tokens or, at lower cost, of one token per position. With one band, a plain softmax."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.bands = bands = Bands(config)
        if len(bands) > 1:
            self.cluster_weight = nn.Parameter(torch.empty(len(bands) - 1, config.embedding_width))
            self.cluster_bias = nn.Parameter(torch.empty(len(bands) - 1))
        self.out_layers = nn.ModuleList(nn.Linear(width, size) for size, width in bands.tables)
        widths = [width for _, width in bands.tables] * (len(bands) if bands.one_table else 1)
        self.out_projs = nn.ParameterList(
            nn.Parameter(torch.empty(config.d_model, width)) for width in (widths if bands.projected else [])
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all tokens: [..., d_model] → [..., V]."""
        head = self._log_softmax(hidden, 0)
        if len(self.bands) == 1:
            return head.to(hidden.dtype)
        first = self.bands.ranges[0][1]
        tails = [head[..., first + i - 1, None] + self._log_softmax(hidden, i) for i in range(1, len(self.bands))]
        return torch.cat([head[..., :first], *tails], dim=-1).to(hidden.dtype)

    def negative_log_likelihood(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """−log p of one token [N] for each hidden state [N, d_model]: [N], float32. Skips bands without tokens."""
        head = self._log_softmax(hidden, 0)
        band, first = self.bands.of(tokens), self.bands.ranges[0][1]
        entry = torch.where(band == 0, tokens, first + band - 1)
        log_likelihood = head.gather(1, entry[:, None])[:, 0]
        for i in range(1, len(self.bands)):
            at = (band == i).nonzero()[:, 0]
            within = tokens[at] - self.bands.ranges[i][0]
            of_band = self._log_softmax(hidden[at], i).gather(1, within[:, None])[:, 0]
            log_likelihood = log_likelihood.index_add(0, at, of_band)
        return -log_likelihood

    def _log_softmax(self, hidden: Tensor, i: int) -> Tensor:
        """Log-softmax within band i, in float32. Band 0 has an entry for each other band, after its tokens."""
        start, end = self.bands.ranges[i]
        layer = self.out_layers[0 if self.bands.one_table else i]
        weight, bias = cast(Tensor, layer.weight), cast(Tensor, layer.bias)
        if self.bands.one_table and len(self.bands) > 1:
            last = i == len(self.bands) - 1  # grows with the vocabulary
            weight, bias = (x[start:] if last else x[start:end] for x in (weight, bias))
        if i == 0 and len(self.bands) > 1:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        if self.bands.projected:
            hidden = F.linear(hidden, self.out_projs[i].t())
        return F.linear(hidden, weight, bias).log_softmax(dim=-1, dtype=torch.float32)
