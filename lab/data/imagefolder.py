"""Image files in one folder per class, decoded by worker processes."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lab.data import GlobalSampler, rank_batches
from lab.settings import checks
from lab.settings.errors import one_line

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's RGB values, in 0 to 1
STD = (0.229, 0.224, 0.225)
NUM_HASHED = 4  # files of each part, about, whose content ranks compare
HOLD_OUT = 10  # without a test folder, one in this many images of a class is for testing
CENTRE = 224 / 256  # share of the shorter side that a test image keeps
File = tuple[str, int]  # path and label
Box = tuple[float, float, float, float]  # left, top, right, bottom, px


class ImageFolder:
    """RGB images, normalised with ImageNet's mean and standard deviation.

    Training images: random resized crop and horizontal flip (Szegedy et al. 2015, section 6),
    which depend on (seed, epoch, index) alone and so not on world size or workers. Test images:
    shorter side to size * 256 / 224, then the centre.

    Args:
        seed: of the augmentation.
        path: holds train/ and test/ (or val/), each with class folders; or class folders alone, of
            which every 10th image is then held out for testing.
        size: height and width, px.
        workers: decoding processes; 0 decodes in this one.
        augment: false treats training images as test images.
    """

    num_classes: int | None
    vocabulary: int | None = None
    input_shape: tuple[int, ...]

    def __init__(
        self,
        *,
        seed: int,
        device: torch.device,
        path: str | None = None,
        size: int = 224,
        workers: int = 2,
        augment: bool = True,
    ) -> None:
        checks.integer("data.size", size, 1)
        checks.integer("data.workers", workers, 0)
        checks.truth("data.augment", augment)
        train, test, self.num_classes = find_files(path)
        self.train_images = ImageFiles(train, size, seed if augment else None)
        self.test_images = ImageFiles(test, size, None)
        self.num_train, self.num_test = len(train), len(test)
        self.unit, self.input_shape, self.input_dtype = "image", (3, size, size), torch.float32
        self._workers, self._device = workers, device
        self._mean = 255 * torch.tensor(MEAN, device=device).view(3, 1, 1)
        self._std = 255 * torch.tensor(STD, device=device).view(3, 1, 1)

    def targets(self) -> tuple[Tensor, Tensor]:
        """See lab.data.Data. Return all targets: folder names give the classes."""
        train, test = (
            torch.tensor([label for _, label in part.files])
            for part in (self.train_images, self.test_images)
        )
        return train, test

    def digest(self) -> str:
        """Hash a few files of both parts, whole: decoding them would start worker processes."""
        hashed = hashlib.sha256()
        for images in (self.train_images, self.test_images):
            for file, label in images.files[:: max(1, len(images.files) // NUM_HASHED)]:
                path = Path(file)
                hashed.update(f"{label} {path.name} ".encode() + path.read_bytes())
        return hashed.hexdigest()

    def train_batches(self, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data. CorruptImage: a file cannot be decoded."""
        batches = (
            list(zip(epochs.tolist(), indices.tolist(), strict=True)) for epochs, indices in sampler
        )
        return self._batches(self._loader(self.train_images, batches))

    def test_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data. The workers end after the last batch of each evaluation.

        Raises:
            CorruptImage: a file cannot be decoded.
        """
        shares = rank_batches(self.num_test, rank, world_size, batch_size)
        batches = [[(0, index) for index in own] for own in shares]
        return self._batches(self._loader(self.test_images, batches))

    def _loader(self, images: ImageFiles, batches: Iterable[list[tuple[int, int]]]) -> DataLoader:
        with warnings.catch_warnings(action="ignore"):  # more workers than cores: the user's choice
            return DataLoader(
                images,
                batch_sampler=batches,
                num_workers=self._workers,
                collate_fn=collate,
                pin_memory=self._device.type == "cuda",
                worker_init_fn=_detach,
                # Forking a process with threads (of NCCL, of autograd) may deadlock the child.
                multiprocessing_context="spawn" if self._workers else None,
                # Drawing from torch's own generator would change dropout and break exact resuming.
                generator=torch.Generator(),
            )

    def _batches(self, loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in loader:
            if isinstance(batch, Exception):
                raise batch
            images, labels = (tensor.to(self._device, non_blocking=True) for tensor in batch)
            yield (images.float() - self._mean) / self._std, labels


def find_files(path: str | None) -> tuple[list[File], list[File], int]:
    """Find training files, test files and the number of classes under `path`.

    Raises:
        ValueError: there is no such folder, or it lacks images of either part.
    """
    layout = "give a folder with train/ and test/ (or val/), or with one folder of images per class"
    if not path:
        raise ValueError(f"data.path is not set; {layout}")
    root = Path(str(path)).expanduser()
    if not root.is_dir():
        raise ValueError(f"data.path={path}: no such folder; {layout}")
    if (root / "train").is_dir():
        train = _by_class(root / "train")
        test = _by_class(root / ("test" if (root / "test").is_dir() else "val"))
    else:
        whole = _by_class(root)
        test = {name: files[::HOLD_OUT] for name, files in whole.items()}
        train = {c: [f for n, f in enumerate(fs) if n % HOLD_OUT] for c, fs in whole.items()}
    for part, files in (("train", train), ("test", test)):
        if not any(files.values()):
            raise ValueError(f"data.path={path} has no images to {part} on; {layout}")
    unknown = sorted(test.keys() - train.keys())
    if unknown:
        raise ValueError(
            f"data.path={path} has no images in train/ for {unknown[0]}, a class in test/; every "
            "class needs images in train/"
        )
    classes = sorted(train)
    return _labelled(train, classes), _labelled(test, classes), len(classes)


def _by_class(folder: Path) -> dict[str, list[str]]:
    """List the image files of each class folder, sorted; none if `folder` does not exist."""
    if not folder.is_dir():
        return {}
    return {
        entry.name: sorted(str(f) for f in entry.rglob("*") if f.suffix.lower() in SUFFIXES)
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    }


def _labelled(files: dict[str, list[str]], classes: list[str]) -> list[File]:
    return [(f, label) for label, name in enumerate(classes) for f in files.get(name, [])]


def _detach(worker: int) -> None:
    """Make this worker end only when its parent tells it to.

    A signal from a terminal or torchrun goes to the whole process group; a worker that died of it
    would fail a run that its parent is about to end in good order. Also, a worker must not finalise
    the interpreter, where torch's threads may abort it; forked workers do not either.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Finalize(None, os._exit, args=(0,), exitpriority=-100)  # after the queues are flushed


class CorruptImage(ValueError):
    """A file that cannot be decoded. Its text is one line that names the file."""


class NoSharedMemory(MemoryError):
    """A batch that a worker cannot hand to its parent. Its text is one line with a remedy."""


Sample = tuple[Tensor, int] | CorruptImage
Batch = tuple[Tensor, Tensor] | CorruptImage | NoSharedMemory


class ImageFiles(Dataset):
    """Decoded files: (epoch, index) -> pixels uint8 [3, size, size] and label.

    A file that cannot be decoded gives a CorruptImage instead: one raised in a worker would reach
    the parent wrapped in the worker's traceback.
    """

    def __init__(self, files: list[File], size: int, augment_seed: int | None) -> None:
        self.files = files
        self.size = size
        self.augment_seed = augment_seed

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        path, label = self.files[index]
        rng = None
        if self.augment_seed is not None:
            rng = np.random.default_rng([self.augment_seed, epoch, index])
        try:
            return decode(path, self.size, rng), label
        except Exception as error:  # Pillow's decoders raise many types
            return CorruptImage(f"data.path: cannot read the image {path}: {one_line(error)}")


def collate(samples: list[Sample]) -> Batch:
    """Stack pixels uint8 [batch, 3, size, size] and labels int64 [batch].

    If an image is corrupt, or a worker's batch does not fit, the error is returned instead.
    """
    images, labels = [], []
    for sample in samples:
        if isinstance(sample, CorruptImage):
            return sample
        images.append(sample[0])
        labels.append(sample[1])
    return _in_shared_memory(torch.stack(images), torch.tensor(labels))


def _in_shared_memory(images: Tensor, labels: Tensor) -> Batch:
    """Share a worker's batch; where torch would, the parent would never hear of an error."""
    if worker := get_worker_info():
        try:
            for tensor in (images, labels):
                tensor.share_memory_()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            return NoSharedMemory(
                f"data.workers={worker.num_workers}: a batch does not fit into /dev/shm: {reason}; "
                "set data.workers=0, or enlarge it, as docker run --shm-size does"
            )
    return images, labels


def decode(path: str, size: int, rng: np.random.Generator | None) -> Tensor:
    """Return pixels uint8 [3, size, size]: a random crop, maybe mirrored; without `rng` the centre.

    Raises:
        Exception: of any type; the file is not a readable image.
    """
    with warnings.catch_warnings(action="ignore"), Image.open(path) as file:
        image = file.convert("RGB")
    box = random_crop(*image.size, rng) if rng else centre_crop(*image.size, CENTRE)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box)
    if rng and rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def random_crop(width: int, height: int, rng: np.random.Generator) -> Box:
    """Draw a box with 8 to 100 % of the area and an aspect ratio from 3/4 to 4/3.

    If ten draws do not fit (a very long image), return the largest centred square.
    """
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    return centre_crop(width, height, 1)


def centre_crop(width: int, height: int, share: float) -> Box:
    """Return the centred square whose side is `share` of the shorter side."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
