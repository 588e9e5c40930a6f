"""ONNX: an exported model gives PyTorch's outputs, also for other batches, lengths and paddings."""

import copy
from functools import partial

import numpy
import pytest
import torch

from families import FULL_PLAN, VOCAB, build
from references import double_loop, relative_error
from rsa_hf import HeadConfig, RSAConfig, patch_model, unpatch_model
from rsa_hf.ops.mask import AttentionMask
from rsa_hf.ops.pytorch import product_in_pytorch
from rsa_hf.rem import Rems
from texts import visible_with_blocks

KINDS = ("regular", "cos", "sin", "regular", "cos", "sin")
DECAY = torch.tensor([-0.9, 0.95, 0.8, 0.7, 0.99, 0.6])
DILATION = (1, 1, 1, 2, 3, 5)


def heads(groups=1):
    return Rems(KINDS, DECAY, torch.full((6,), 0.7), DILATION, groups, tuple(range(6)))


@pytest.fixture(scope="module")
def onnxruntime():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        found = pytest.importorskip(package, reason=f"ONNX export needs {package}: pip install 'rsa_hf[onnx]'")
    return found


NAMED = RSAConfig(
    heads=[
        HeadConfig(0, 1, "regular", decay=0.9, gate=0.4),
        HeadConfig(0, 6, "sin", decay=0.8, gate=0.5, theta=0.7, dilation=2),
        HeadConfig(1, 5, "cos", decay=0.7, gate=0.6, theta=0.4),
    ]
)


@pytest.fixture(scope="module", params=[FULL_PLAN, NAMED], ids=["counts", "named heads"])
def exported(request, onnxruntime, tmp_path_factory):
    """A patched RoBERTa and its export, which was made with a batch of 2 and a length of 11."""
    torch.manual_seed(0)
    model = patch_model(build("roberta"), request.param)
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    ids = torch.randint(3, VOCAB, (2, 11))
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=100)}
    torch.onnx.export(
        model,
        (),
        path,
        kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        dynamic_shapes={"input_ids": dynamic, "attention_mask": dynamic},
        input_names=["input_ids", "attention_mask"],
        dynamo=True,
    )
    return model, onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.slow  # exports a model
@pytest.mark.parametrize(("batch", "length", "padding"), [(2, 11, 0), (1, 7, 0), (3, 40, 5), (5, 93, 12)])
def test_an_exported_roberta_gives_the_same_outputs(exported, batch, length, padding):
    model, session = exported
    ids = torch.randint(3, VOCAB, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, length - padding :] = 0
    ids[mask == 0] = model.config.pad_token_id
    found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    real = mask.bool().numpy()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state.numpy()
        plain = unpatch_model(copy.deepcopy(model))
        without = plain(input_ids=ids, attention_mask=mask).last_hidden_state.numpy()
    numpy.testing.assert_allclose(found[real], expected[real], atol=1e-5, rtol=1e-5)
    # The control: the recurrence matters.
    assert numpy.abs(found - without)[real].mean() > 1e-2


@pytest.mark.slow  # exports a graph
def test_an_exported_product_reads_masks_of_images_prefixes_and_static_caches(onnxruntime, tmp_path):
    class Product(torch.nn.Module):
        def forward(self, value, mask):
            return product_in_pytorch(
                value, heads(), AttentionMask(mask.shape[2], value.shape[2], 0, True, unread_mask=mask)
            )

    batch, length, keys = (torch.export.Dim(name, max=99) for name in ("batch", "length", "keys"))
    torch.onnx.export(
        Product(),
        (torch.randn(2, 6, 17, 4), visible_with_blocks("..aaaa...", 3, 5, (2, 0), (0, 1))),
        tmp_path / "product.onnx",
        dynamic_shapes=({0: batch, 2: keys}, {0: batch, 2: length, 3: keys}),
        input_names=["value", "mask"],
        dynamo=True,
    )
    session = onnxruntime.InferenceSession(str(tmp_path / "product.onnx"), providers=["CPUExecutionProvider"])
    for text, before, behind in (("..aaaa...", 3, 5), ("aaaaa", 0, 7), ("aaaaa.....bb.", 4, 0), ("aaa.", 0, 0)):
        mask = visible_with_blocks(text, before, behind, (2, 0, 0), (0, 1, 0))
        value = torch.randn(3, 6, mask.shape[-1], 4)
        found = session.run(None, {"value": value.numpy(), "mask": mask.numpy()})[0]
        theta = torch.full((6,), 0.7)
        expected = double_loop(value, KINDS, DECAY, theta, DILATION, len(text), before, True, mask)
        own = torch.arange(len(text))
        real = mask[:, 0, own, before + own]  # the output of padding is not used
        error = relative_error(torch.from_numpy(found).transpose(1, 2)[real], expected.transpose(1, 2)[real])
        assert error < 1e-5


class LastHiddenState(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).last_hidden_state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("record", [torch.jit.trace, partial(torch.onnx.export, dynamo=False)])
def test_tracing_is_an_error_that_names_the_alternative(record, tmp_path):
    model = build("roberta")
    file = () if record is torch.jit.trace else (tmp_path / "model.onnx",)
    arguments = (LastHiddenState(model), (torch.randint(3, VOCAB, (2, 11)),), *file)
    record(*arguments)
    patch_model(model)
    with pytest.raises(NotImplementedError, match=r"Use torch.export, or torch.onnx.export\(..., dynamo=True\)"):
        record(*arguments)
