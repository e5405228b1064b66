"""Networks of images: published counts, shapes, smallest images, one step, and wrong arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lab.measure.operations import counts_of
from lab.model.alexnet import (
    alexnet,
    alexnet_cifar,
    alexnet_mxnet,
    alexnet_paper,
    alexnet_small,
    overfeat,
)
from lab.model.convnet import ConvNet, keras_cnn, lenet, vgg11, vgg16, vgg19
from lab.model.inception import googlenet, inception_bn
from lab.model.mlp import fcn5, keras_mlp, mlp
from lab.model.resnet import Subsample, resnet50, resnet56
from lab.model.work import Counts
from lab.settings.config import build, choices_of, load
from lab.transform.transforms import Fc1x1
from tests.conftest import ROOT
from tests.support import refusing
from tests.support.slow import some_of

Make = Callable[..., nn.Module]
IMAGENET, MNIST = (3, 224, 224), (1, 28, 28)
LANGUAGE = ("lstm", "transformer")
PUBLISHED = [
    # settings, input, classes, parameters, source
    ("vgg11", IMAGENET, 1000, 132_863_336, "133 M: Simonyan & Zisserman, table 2; torchvision"),
    ("vgg16", IMAGENET, 1000, 138_357_544, "138 M: Simonyan & Zisserman, table 2; torchvision"),
    ("vgg19", IMAGENET, 1000, 143_667_240, "144 M: Simonyan & Zisserman, table 2; torchvision"),
    ("googlenet", IMAGENET, 1000, 6_998_552, "Caffe's bvlc_googlenet without auxiliary heads"),
    ("resnet50", IMAGENET, 1000, 25_557_032, "torchvision"),
    ("resnet50 stride_in=3x3", IMAGENET, 1000, 25_557_032, "torchvision"),
    ("resnet152", IMAGENET, 1000, 60_192_808, "torchvision"),
    # stem 464; stages 9*4672, 13952+8*18560, 55552+8*73984; FC 650
    ("resnet56", (3, 32, 32), 10, 853_018, "0.85 M: He et al., table 6"),
    ("overfeat", (3, 231, 231), 1000, 145_920_872, "145 M: Sermanet et al., table 1's sizes"),
    ("alexnet widths=[64,192,384,256,256]", IMAGENET, 1000, 61_100_840, "torchvision"),
    ("alexnet_mxnet", (3, 227, 227), 1000, 62_378_344, "from the example's layers"),
    ("alexnet_mxnet", IMAGENET, 1000, 50_844_008, "from the example's layers"),
    ("keras_cnn", (3, 100, 100), 10, 7_998_250, "from the guide's layers"),
    ("keras_cnn blocks=[[32,64]] hidden=128", MNIST, 10, 1_199_882, "Keras' mnist_cnn"),
    ("keras_mlp", (20,), 10, 6_154, "from the guide's layers"),
    (
        "keras_mlp hidden=[512,512] activation=relu dropout=0.2",
        *(MNIST, 10, 669_706, "Keras' mnist_mlp"),
    ),
    ("mlp hidden=[5]", (1, 4, 4), 3, 17 * 5 + 6 * 3, "by hand"),
    ("mlp hidden=[]", (1, 4, 4), 3, 17 * 3, "by hand"),
    ("lenet", MNIST, 10, 520 + 25_050 + 400_500 + 5_010, "Caffe's MNIST example"),
    ("alexnet", IMAGENET, 1000, 61_838_248, "from the paper's layers"),
    ("alexnet_paper", IMAGENET, 1000, 62_378_344, "slide 8"),
    ("alexnet_paper", (3, 227, 227), 1000, 62_378_344, "slide 8"),
    # 785*2048 + 2049*4096 + 4097*1024 + 1025*10
    ("fcn5", MNIST, 10, 14_205_962, "from dlbench's layers"),
    # 26753*2048 + 2*2049*2048 + 2049*26752
    ("fcn5_s", (1, 1, 26752), 26752, 117_997_696, "~118 M: dlbench's table"),
    # 76*32 + 801*32 + 801*64 + 577*10
    ("alexnet_cifar", (3, 32, 32), 10, 85_098, "from dlbench's layers"),
]


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]


def made(settings: str, **arguments: Any) -> nn.Module:
    """Build a choice of the group, without memory for its weights."""
    name, *values = settings.split()
    config = load([f"model={name}", *(f"model.{value}" for value in values)])
    with torch.device("meta"):
        return build(config.model, **arguments)


@pytest.mark.parametrize("name", some_of(choices_of("model"), every=3))
def test_every_config_makes_a_model_that_trains(name: str) -> None:
    settings = load([f"model={name}", "profile=alexnet_titanx"])  # only replay reads the profile
    tokens = {"vocabulary": 7} | ({"context": 5} if name == "transformer" else {})
    with torch.device("meta"):  # which computes shapes, and gradients' shapes, alone
        if name in LANGUAGE:
            model, inputs = build(settings.model, **tokens), torch.zeros(2, 5, dtype=torch.int64)
        else:
            model = build(settings.model, input_shape=(3, 96, 96), output_size=7)
            inputs = torch.zeros(2, 3, 96, 96)
        logits = model(inputs)
    assert logits.shape == ((2, 5, 7) if name in LANGUAGE else (2, 7))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "shape", "classes", "parameters"), some_of([row[:4] for row in PUBLISHED], every=3)
)
def test_has_its_published_parameters(
    settings: str, shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    model = made(settings, input_shape=shape, output_size=classes)
    assert size(model) == parameters
    assert model(torch.empty(2, *shape, device="meta")).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "shape", "classes"), [("alexnet", IMAGENET, 1000), ("alexnet_small", (1, 32, 32), 10)]
)
def test_most_parameters_are_in_fc_layers(name: str, shape: tuple[int, ...], classes: int) -> None:
    model = made(name, input_shape=shape, output_size=classes)
    assert isinstance(model, ConvNet)
    assert size(model.classifier) / size(model) == pytest.approx(0.948, abs=5e-4)


def test_weights_depend_on_the_seed_alone() -> None:
    found: list[torch.Tensor] = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model = lenet(input_shape=(1, 16, 16), output_size=2)
        found.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def documented() -> dict[str, tuple[int, list[int]]]:
    """By settings: the parameters in the table of docs/models.md, and the numbers of its input."""
    text = re.sub(r"(?<=\d) (?=\d{3})", "", (ROOT / "docs/models.md").read_text())
    rows = re.findall(r"^\| `([^`]+)` \|.*?\| (\d+) \|([^|]+)\|", text, re.MULTILINE)
    return {row[0]: (int(row[1]), [int(n) for n in re.findall(r"\d+", row[2])]) for row in rows}


def test_every_model_is_documented() -> None:
    named = {settings.split()[0] for settings in documented()} | {"replay"}
    assert named == set(choices_of("model"))


@pytest.mark.parametrize("settings", documented())
def test_has_its_documented_parameters(settings: str) -> None:
    parameters, numbers = documented()[settings]
    plain = settings.replace("model.", "")
    if plain.startswith(("lstm", "transformer")):
        arguments: dict[str, Any] = dict(zip(("vocabulary", "context"), numbers, strict=False))
        assert size(made(plain, **arguments)) == parameters
        return
    *shape, classes = numbers
    published = {(row[0], row[1], row[2]): row[3] for row in PUBLISHED}  # and asserted above
    found = published.get((plain, tuple(shape), classes))
    if found is None:
        found = size(made(plain, input_shape=tuple(shape), output_size=classes))
    assert found == parameters


def test_inception_bn_has_its_published_parameters_but_for_biases() -> None:
    model = made("inception_bn", input_shape=IMAGENET, output_size=1000)
    biases = sum(layer.out_channels for layer in convolutions(model))
    # The ports of Caffe's BN-Inception, such as Cadene's pretrained-models, have these biases.
    assert size(model) + biases == 11_295_240


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (vgg19, 19.6e9),  # He et al., figure 3
        (partial(resnet50, stride_in="3x3"), 4.1e9),  # torchvision, as 4.09 GFLOPS
        (googlenet, 1502e6 - 34e6 + 118e6),  # its table 1; a dense first convolution has 118 M
    ],
)
def test_has_its_published_operations(make: Make, published: float) -> None:
    operations = counts_of(make).operations
    assert sum(operations.values()) / 2 == pytest.approx(published, rel=0.02)  # multiply-adds
    last = list(operations)[-1]
    assert last == f"fc{len(operations)}"


@pytest.mark.parametrize(
    ("make", "smallest"),
    [
        *((make, 32) for make in (vgg11, googlenet, inception_bn, resnet50)),
        *((lenet, 16), (alexnet, 63), (alexnet_small, 8)),
        *((resnet56, 4), (overfeat, 71), (alexnet_mxnet, 67), (keras_cnn, 16)),
        (alexnet_cifar, 15),
    ],
)
def test_images_may_be_as_small_as_is_said(make: Make, smallest: int) -> None:
    with torch.device("meta"):
        model = make(input_shape=(1, smallest, smallest + 5), output_size=2)
        assert model(torch.empty(2, 1, smallest, smallest + 5)).shape == (2, 2)
        if isinstance(model, ConvNet):
            with pytest.raises(RuntimeError, match="too small|greater than actual"):
                model.features(torch.empty(2, 1, smallest - 1, smallest))
    with pytest.raises(ValueError) as caught:
        make(input_shape=(1, smallest + 5, smallest - 1), output_size=2)
    name = getattr(make, "__name__", "")
    assert str(caught.value) == (
        f"model={name}: images of {smallest + 5}x{smallest - 1} px are too small; the model needs "
        f"at least {smallest} px; set data.size={smallest} or more (data.shape for data=synthetic)"
    )


@pytest.mark.parametrize(
    ("make", "channels", "pixels"),
    some_of(
        [
            (partial(googlenet, dropout=0.0), 3, 32),
            (partial(vgg19, hidden=32, dropout=0.0), 1, 32),
            (inception_bn, 1, 64),
            (resnet50, 3, 64),
            (resnet56, 1, 8),
            (partial(keras_cnn, hidden=32, block_dropout=0.0, dropout=0.0), 1, 16),
            (partial(keras_mlp, dropout=0.0), 1, 8),
            (partial(fcn5, hidden=[32, 64, 16]), 1, 8),
        ],
        every=3,
    ),
)
def test_a_step_reduces_the_loss(make: Make, channels: int, pixels: int) -> None:
    torch.manual_seed(0)
    model = make(input_shape=(channels, pixels, pixels), output_size=3)
    images, labels = torch.randn(4, channels, pixels, pixels), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    before = cross_entropy(model(images), labels)
    before.backward()
    optimizer.step()
    with torch.no_grad():
        after = cross_entropy(model(images), labels)
    assert after < before < 5  # ln(3) = 1.1 if the first outputs were equal


@pytest.mark.parametrize("name", ["vgg11", "overfeat", "alexnet_mxnet", "alexnet", "keras_cnn"])
def test_fc1x1_rewrites_classic_heads(name: str) -> None:
    shape = (3, 96, 96)
    model = made(name, input_shape=shape, output_size=7)
    for mode in ("substitution", "equivalent"):
        with torch.device("meta"):
            other = Fc1x1(mode)(model)
        assert not any(isinstance(layer, nn.Linear) for layer in other.modules())
        assert other(torch.empty(2, *shape, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("stride_in", ["1x1", "3x3"])
def test_the_stride_is_where_it_is_said(stride_in: str) -> None:
    model = made(f"resnet50 stride_in={stride_in}", input_shape=IMAGENET, output_size=2)
    halving = [
        layer.kernel_size for layer in convolutions(model.get_submodule("stage2.0.body"))
        if layer.stride == (2, 2)
    ]  # fmt: skip
    assert halving == [(1, 1) if stride_in == "1x1" else (3, 3)]


def test_a_shortcut_without_parameters_keeps_every_second_pixel() -> None:
    images = torch.arange(32.0).view(1, 2, 4, 4)
    shortened = Subsample(stride=2, more=1)(images)
    assert shortened.shape == (1, 3, 2, 2)
    assert shortened[0, 0].tolist() == [[0, 2], [8, 10]]
    assert not shortened[0, 2].any()


def test_where_dropout_stands() -> None:
    def names(make: Make, pixels: int) -> list[str]:
        with torch.device("meta"):
            model = make(input_shape=(1, pixels, pixels), output_size=2)
        assert isinstance(model, ConvNet)
        return [type(layer).__name__ for layer in model.classifier]

    after = ["Flatten", *["Linear", "ReLU", "Dropout"] * 2, "Linear"]
    assert names(vgg11, 32) == names(alexnet_mxnet, 67) == after
    before = ["Flatten", *["Dropout", "Linear", "ReLU"] * 2, "Linear"]
    assert names(overfeat, 71) == names(partial(alexnet_small, dropout=0.5), 8) == before
    assert names(alexnet_small, 8) == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (vgg16, {"hidden": 0}, "model.hidden=0: must be an integer of at least 1"),
        (vgg16, {"dropout": 1}, "model.dropout=1: must be a number of at least 0 and below 1"),
        (googlenet, {"dropout": -1}, "model.dropout=-1: must be a number of at least 0 and below"),
        (alexnet, {"widths": [64, 192]}, "model.widths=[64, 192]: must be five integers"),
        (alexnet, {"widths": 64}, "model.widths=64: must be a list of integers, each at least 1"),
        (fcn5, {"hidden": [0]}, "model.hidden=[0]: must be a list of integers, each at least 1"),
        (mlp, {"hidden": ""}, "model.hidden=: must be a list of integers, each at least 1"),
        (mlp, {"hidden": 5}, "model.hidden=5: must be a list of integers, each at least 1"),
        (keras_cnn, {"blocks": []}, "model.blocks=[]: must be a list of blocks"),
        (keras_cnn, {"blocks": [32]}, "model.blocks=32: must be a list of integers"),
    ],
)
def test_refuses_in_one_line(make: Make, arguments: dict[str, Any], message: str) -> None:
    with torch.device("meta"), refusing(message):
        make(input_shape=(1, 96, 96), output_size=2, **arguments)


@pytest.mark.parametrize("name", [name for name in choices_of("model") if name != "replay"])
def test_each_argument_is_checked(name: str) -> None:
    node = load([f"model={name}"]).model
    images = {"input_shape": (1, 96, 96), "output_size": 2}
    given = {"vocabulary": 7, "context": 5} if name in LANGUAGE else images
    for key in node.keys() - {"_target_"}:
        with torch.device("meta"), refusing(f"model.{key}=wrong: "):
            build(node, **{**given, key: "wrong"})


def test_of_an_mlp_by_hand() -> None:
    def make(**shape: Any) -> nn.Module:
        return mlp(**shape, hidden=[10])

    inputs = 3 * 224 * 224
    parameters = 10 * inputs + 10 + 11 * 1000
    operations = {"fc1": 2 * 10 * inputs, "fc2": 2 * 10 * 1000}
    assert counts_of(make) == Counts(parameters, parameters, operations)


def test_conv2_of_the_paper_is_the_product_on_its_slide() -> None:
    counted = counts_of(alexnet_paper)
    # C, H, W, R, S and K of slide 8.
    assert counted.operations["conv2"] == 2 * 96 * 27 * 27 * 5 * 5 * 256
    assert [*counted.operations] == [*(f"conv{n}" for n in range(1, 6)), "fc6", "fc7", "fc8"]
    assert (counted.parameters, counted.fully_connected) == (62_378_344, 58_631_144)
