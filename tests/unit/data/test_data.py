"""Promises of all data sets, and of each one."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor

from lab.data import Data, GlobalSampler, TensorData, imagefolder
from lab.data.digits import _rotate, digits, rotated_digits
from lab.data.imagefolder import CorruptImage, ImageFolder, Sample, centre_crop, random_crop
from lab.data.synthetic import synthetic, synthetic_tokens
from lab.settings.files import conf_dir
from tests.conftest import ROOT
from tests.support import refusing

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two classes with 10 and 6 training images and 3 test images each, all different."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for part, counts in (("train", (10, 6)), ("test", (3, 3))):
        for name, count in zip(("ant", "bee"), counts, strict=True):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(256, size=(20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a text of 1000 bytes, as many token ids, and arrays of 60 samples."""
    root, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    (root / "text").write_bytes(rng.bytes(1000))
    rng.integers(1000, size=1000, dtype=np.uint16).tofile(root / "tokens.bin")
    numbers, classes = rng.normal(size=(60, 2, 3)), rng.integers(4, size=60)
    np.savez(root / "arrays.npz", inputs=numbers, targets=classes)
    return root


@pytest.fixture(
    scope="module", params=["digits", "synthetic", "imagefolder", "text", "tokens", "arrays"]
)
def data(request: pytest.FixtureRequest, folder: Path, files: Path) -> Data:
    more = {
        "imagefolder": {"path": str(folder), "size": 16, "workers": 0},
        "text": {"path": str(files / "text"), "context": 16},
        "tokens": {"path": str(files / "tokens.bin"), "context": 16},
        "arrays": {"path": str(files / "arrays.npz")},
    }
    config = OmegaConf.load(conf_dir() / "data" / f"{request.param}.yaml")
    return instantiate(config, seed=3, device=CPU, **more.get(request.param, {}))


def train(data: Data, num_batches: int, world_size: int = 1, start: int = 0) -> tuple[Tensor, ...]:
    """Return images and labels of the first global batches of 12, joined in rank order."""
    ranks = []
    for rank in range(world_size):
        sampler = GlobalSampler(data.num_train, 12, rank, world_size, seed=1, start=start)
        ranks.append(list(islice(data.train_batches(sampler), num_batches)))
    batches = [batch for parts in zip(*ranks, strict=True) for batch in parts]
    return tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))


def decoded(sample: Sample) -> Tensor:
    assert not isinstance(sample, CorruptImage)
    return sample[0]


def assert_same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_batches_have_the_promised_types(data: Data) -> None:
    inputs, targets = train(data, 2)
    assert inputs.shape == (24, *data.input_shape) and inputs.dtype == data.input_dtype
    positions = data.input_shape if data.vocabulary else ()
    assert targets.shape == (24, *positions) and targets.dtype == torch.int64
    assert targets.min() >= 0 and targets.max() < (data.num_classes or 0)
    assert inputs.dtype == (torch.int64 if data.vocabulary else torch.float32)


@pytest.mark.parametrize("world_size", [2, 3])
def test_world_size_changes_no_training_sample(data: Data, world_size: int) -> None:
    assert_same(train(data, 4, world_size), train(data, 4))


def test_training_resumes_exactly(data: Data) -> None:
    whole = train(data, 4)
    assert_same(train(data, 2, world_size=2, start=24), tuple(part[24:] for part in whole))


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_every_test_sample_comes_once_over_the_ranks(data: Data, world_size: int) -> None:
    ((whole, labels),) = data.test_batches(0, 1, data.num_test)
    for rank in range(world_size):
        batches = list(data.test_batches(rank, world_size, 2))
        assert all(1 <= len(part) <= 2 for part, _ in batches)
        assert torch.equal(torch.cat([images for images, _ in batches]), whole[rank::world_size])
        assert torch.equal(torch.cat([part for _, part in batches]), labels[rank::world_size])


def test_a_rank_may_have_nothing_to_test(data: Data) -> None:
    assert list(data.test_batches(data.num_test, data.num_test + 1, 4)) == []


def test_data_leaves_the_global_generator_alone(data: Data) -> None:
    before = torch.get_rng_state()
    train(data, 1)
    list(data.test_batches(0, 1, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_digits_are_those_of_scikit_learn() -> None:
    # Slow to import, so not for every process that only collects tests.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    split = {"test_size": 360, "stratify": classes, "random_state": 0}
    indices = np.concatenate(train_test_split(np.arange(len(classes)), **split))
    with np.load(ROOT / "lab/data/digits.npz") as file:
        assert np.array_equal(file["pixels"].reshape(-1, 64), pixels[indices])
        assert np.array_equal(file["classes"], classes[indices])


def test_digits_are_normalised_and_split_alike_for_all_seeds() -> None:
    data, other = (digits(seed=seed, device=CPU, size=16) for seed in (0, 1))
    assert (data.num_train, data.num_test, data.num_classes) == (1437, 360, 10)
    assert data.input_shape == (1, 16, 16)
    ((images, labels),) = data.test_batches(0, 1, 360)
    assert labels.bincount().min() >= 34  # stratified
    assert_same((images, labels), next(other.test_batches(0, 1, 360)))
    every = GlobalSampler(1437, 1437, 0, 1, seed=0)
    images, _ = next(data.train_batches(every))
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std().item() == pytest.approx(1, abs=1e-5)


def test_rotated_digits_have_their_angle_as_target() -> None:
    data, again, other = (rotated_digits(seed=s, device=CPU, size=8) for s in (0, 0, 1))
    assert (data.num_train, data.num_test, data.num_classes) == (1437, 360, None)
    angles = torch.cat(data.targets())
    assert angles.dtype == torch.float32 and angles.abs().max() <= math.radians(45)
    assert angles.std().item() == pytest.approx(math.radians(90) / 12**0.5, rel=0.05)  # uniform
    assert torch.equal(angles, torch.cat(again.targets()))
    assert not torch.equal(angles, torch.cat(other.targets()))


def test_images_turn_counterclockwise() -> None:
    images = torch.rand(2, 1, 5, 5)
    turned = _rotate(images, torch.tensor([math.pi / 2, 0.0]))
    torch.testing.assert_close(turned[0], images[0].rot90(1, (1, 2)), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[1], images[1], atol=1e-5, rtol=0)


def test_targets_are_those_that_are_trained_and_tested_on(data: Data) -> None:
    train_targets, test_targets = data.targets()
    assert (len(train_targets), len(test_targets)) == (data.num_train, data.num_test)
    assert torch.equal(next(data.test_batches(0, 1, data.num_test))[1], test_targets)
    every = GlobalSampler(data.num_train, data.num_train, 0, 1, seed=0)
    _, targets = next(data.train_batches(every))
    assert torch.equal(targets.flatten().sort().values, train_targets.flatten().sort().values)


def test_synthetic_depends_on_the_seed_alone() -> None:
    make = partial(synthetic, device=CPU, shape=[1, 2, 3], num_classes=4, num_images=40)
    data = make(seed=0)
    assert (data.input_shape, data.num_train, data.num_test) == ((1, 2, 3), 40, 5)
    assert_same(train(data, 2), train(make(seed=0), 2))
    assert not torch.equal(train(data, 2)[0], train(make(seed=1), 2)[0])


def test_indices_travel_from_pinned_memory_and_a_step_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, Any]] = []
    move = Tensor.to
    part = torch.zeros(40, 1, 2, 3, device="meta"), torch.zeros(40, device="meta")  # not on host

    def to(self: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        log.append(("copied", non_blocking))
        return move(self, device)

    monkeypatch.setattr(Tensor, "pin_memory", lambda self: log.append(("pinned", True)) or self)
    data = TensorData(part, part, unit="image", num_classes=2)
    monkeypatch.setattr(Tensor, "to", to)
    batches = data.train_batches(GlobalSampler(40, 12, 0, 1, seed=0))
    one = [("pinned", True), ("copied", True)]
    for steps_begun in (1, 2, 3):
        next(batches)
        assert log == one * (steps_begun + 1)


def test_workers_change_nothing_and_outlive_signals_to_the_parent(folder: Path) -> None:
    make = partial(ImageFolder, seed=3, device=CPU, path=str(folder), size=16)
    expected = train(make(workers=0), 8)
    sampler = GlobalSampler(16, 12, 0, 1, seed=1)
    others = set(multiprocessing.active_children())
    batches = make(workers=2).train_batches(sampler)
    got = [next(batches), next(batches)]  # one from each worker: both have begun
    for worker in set(multiprocessing.active_children()) - others:
        assert worker.pid and os.getpgid(worker.pid) != os.getpgrp()
        os.kill(worker.pid, signal.SIGINT)
    got += islice(batches, 6)
    assert_same(tuple(torch.cat(tensors) for tensors in zip(*got, strict=True)), expected)


def test_augmentation_changes_with_epoch_and_seed_and_can_be_off(folder: Path) -> None:
    make = partial(ImageFolder, device=CPU, path=str(folder), size=16, workers=0)

    def first_image_of(epochs: range, **arguments: Any) -> list[Tensor]:
        images = make(**arguments).train_images
        return [decoded(images[epoch, 0]) for epoch in epochs]

    a, b = first_image_of(range(2), seed=0)
    assert not torch.equal(a, b)
    assert not torch.equal(a, first_image_of(range(1), seed=1)[0])
    a, b = first_image_of(range(2), seed=0, augment=False)
    assert torch.equal(a, b)


def test_test_images_are_centred_and_normalised_as_imagenet(tmp_path: Path) -> None:
    pixels = np.zeros((64, 128, 3), dtype=np.uint8)
    pixels[4:60, 36:92] = (255, 0, 51)  # the centre that 56 of 64 rows and as many columns make
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / part / "a" / "0.PNG")
    data = ImageFolder(seed=0, device=CPU, path=str(tmp_path), size=56, workers=0)
    ((images, _),) = data.test_batches(0, 1, 1)
    colour = [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225]
    expected = torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 56, 56)
    torch.testing.assert_close(images, expected)


def test_random_crops_stay_within_the_image_and_their_limits() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        left, top, right, bottom = random_crop(300, 200, rng)
        width, height = right - left, bottom - top
        assert 0 <= left < right <= 300 and 0 <= top < bottom <= 200
        assert 0.079 < width * height / 60_000 <= 1
        assert 0.74 < width / height < 1.35
    assert random_crop(1000, 2, rng) == centre_crop(1000, 2, 1)  # no draw fits


def test_one_level_of_class_folders_holds_out_every_tenth_image(folder: Path) -> None:
    data = ImageFolder(seed=0, device=CPU, path=str(folder / "train"), size=8, workers=0)
    assert (data.num_train, data.num_test, data.num_classes) == (14, 2, 2)
    ((_, labels),) = data.test_batches(0, 1, 2)
    assert labels.tolist() == [0, 1]


def test_a_batch_that_does_not_fit_into_shared_memory_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(imagefolder, "get_worker_info", lambda: SimpleNamespace(num_workers=2))
    monkeypatch.setattr(Tensor, "share_memory_", refuse)
    data = ImageFolder(seed=0, device=CPU, path=str(folder), size=8, workers=0)
    with pytest.raises(imagefolder.NoSharedMemory, match=r"^data\.workers=2: .*No space.*shm-size"):
        next(iter(data.test_batches(0, 1, 4)))


@pytest.mark.parametrize(("workers", "share"), [(0, 0), (1, 0), (0, 0.5)])
def test_a_corrupt_or_truncated_file_is_named_in_one_line(
    folder: Path, tmp_path: Path, workers: int, share: float
) -> None:
    whole = (folder / "train" / "ant" / "0.png").read_bytes()
    (tmp_path / "a").mkdir()
    for number in range(2):
        content = whole[: int(share * len(whole))] or b"no image"
        (tmp_path / "a" / f"{number}.png").write_bytes(content)
    data = ImageFolder(seed=0, device=CPU, path=str(tmp_path), size=8, workers=workers)
    with pytest.raises(CorruptImage) as caught:
        list(data.test_batches(0, 1, 1))
    message = str(caught.value)
    assert message.startswith(f"data.path: cannot read the image {tmp_path}/a/0.png: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["train/a"], "no images to train on"),
        (["train/a/0.png"], "no images to test on"),
        (["train/a/0.png", "test/b/0.png"], "has no images in train/ for b, a class in test/"),
        ([], "no images to train on"),
    ],
)
def test_a_folder_without_what_it_needs(tmp_path: Path, folders: list[str], message: str) -> None:
    for name in folders:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if path.suffix else path.mkdir()
    with pytest.raises(ValueError, match=message) as caught:
        ImageFolder(seed=0, device=CPU, path=str(tmp_path))
    assert str(caught.value).startswith(f"data.path={tmp_path}")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (digits, {"size": 7}, "data.size=7: must be an integer from 8 to 4096"),
        (digits, {"size": 8.5}, "data.size=8.5: must be an integer from 8 to 4096"),
        (synthetic, {"shape": [3, 0, 1]}, "data.shape=[3, 0, 1]: must be three integers [C, H, W]"),
        (synthetic, {"shape": 32}, "data.shape=32: must be three integers [C, H, W]"),
        (synthetic, {"num_images": 0}, "data.num_images=0: must be an integer of at least 1"),
        (rotated_digits, {"max_degrees": 0}, "data.max_degrees=0: must be a number above 0"),
        (synthetic, {"num_classes": "a"}, "data.num_classes=a: must be an integer of at least 1"),
        (synthetic_tokens, {"vocabulary": 0}, "data.vocabulary=0: must be an integer of at least"),
        (synthetic_tokens, {"context": 0}, "data.context=0: must be an integer of at least 1"),
        (synthetic_tokens, {"num_sequences": 0}, "data.num_sequences=0: must be an integer of at"),
        (ImageFolder, {"size": 0}, "data.size=0: must be an integer of at least 1"),
        (ImageFolder, {"workers": -1}, "data.workers=-1: must be an integer of at least 0"),
        (ImageFolder, {"augment": "a"}, "data.augment=a: must be true or false"),
        (ImageFolder, {}, "data.path is not set; give a folder with train/ and test/"),
        (ImageFolder, {"path": "/none"}, "data.path=/none: no such folder; give a folder with"),
    ],
)
def test_refuses_in_one_line(
    make: Callable[..., Data], arguments: dict[str, Any], message: str
) -> None:
    with refusing(message):
        make(seed=0, device=CPU, **arguments)


def test_synthetic_tokens_are_random_ids_of_the_vocabulary() -> None:
    data = synthetic_tokens(seed=1, device=CPU, vocabulary=5, context=4, num_sequences=100)
    assert (data.num_train, data.num_test, data.input_shape) == (100, 12, (4,))
    inputs, targets = next(iter(data.test_batches(0, 1, 12)))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert set(inputs.unique().tolist()) == set(range(5))
