"""English and German sentences: from the message catalogues of free software, or any files with a sentence a line.

The catalogues are taken out of Debian packages, because ``apt-get download`` needs no root and gets through every mirror that the
machine is set up for. They are cleaned, split so that no test sentence has a near-duplicate among the training sentences, and
kept as plain text files in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from common.datasets import DatasetError, download

SPLITS = ("train", "valid", "test")
LANGUAGES = ("en", "de")


@dataclass(frozen=True)
class Pairs:
    """Sentences and their translations."""

    source: list[str]
    target: list[str]

    def __len__(self) -> int:
        return len(self.source)

    def first(self, count: int) -> Pairs:
        return Pairs(self.source[:count], self.target[:count])


@dataclass(frozen=True)
class Corpus:
    """What a model is trained on, what is looked at meanwhile, and what it is judged by."""

    train: Pairs
    valid: Pairs
    test: Pairs


# ------------------------------------------------------------------------------------------------------------- catalogues

def read_mo(data: bytes, name: str) -> Iterator[tuple[str, str]]:
    """The messages of a compiled gettext catalogue and their translations, without contexts; each plural form by itself.

    A catalogue is a magic number, a version, the number of messages, the offsets of two tables with the length and offset of
    each message and each translation. The empty message's translation is a header. See the manual of gettext, "MO Files".

    Raises:
        DatasetError: if the bytes are no such catalogue.
    """
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(data[:4])
    if order is None:
        raise DatasetError(f"{name} is no gettext catalogue: it starts with {data[:4].hex() or 'nothing'}, expected de120495")

    def text(table: int, index: int) -> str:
        length, offset = struct.unpack_from(f"{order}2I", data, table + 8 * index)
        if offset + length > len(data):
            raise DatasetError(f"{name} ends inside message {index}")
        return data[offset:offset + length].decode()

    try:
        count, messages, translations = struct.unpack_from(f"{order}3I", data, 8)
        for index in range(count):
            message = text(messages, index).rpartition("\4")[2]
            for pair in zip(message.split("\0"), text(translations, index).split("\0")):
                if message:
                    yield pair
    except (struct.error, UnicodeDecodeError) as error:
        raise DatasetError(f"{name} is damaged: {error}") from error


# --------------------------------------------------------------------------------------------------------------- cleaning

_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_PLACEHOLDER = re.compile(r"%[-+ #0-9.*$]*[A-Za-z<>(]|%\d|[{}\\|`@=]|\$[\w(]|\w\(\)|://|<|>|\[|\]")
_ACCELERATOR = re.compile(r"[_&~](?=\w)")
_SPACES = re.compile(r"\s+")
_WORD = re.compile(r"[^\W\d_]+")
_GERMAN = frozenset({
    "der", "die", "das", "und", "nicht", "ist", "den", "dem", "des", "ein", "eine", "einen", "wird", "werden", "von", "für", "mit",
    "auf", "im", "zu", "zum"})
_ENGLISH = frozenset({
    "the", "of", "and", "to", "is", "not", "for", "with", "this", "be", "are", "that", "from", "it", "you", "was", "an", "by",
    "or"})
MIN_WORDS, MAX_WORDS = 2, 30


def clean(source: str, target: str) -> tuple[str, str] | None:
    """A message and its translation as sentences, or None where they are no good.

    Tags, accelerators (``_File``, ``&File``, ``~File``), and colons and dots at the end that are no full stops go. A pair is no
    good with placeholders or pieces of code, with fewer than 2 or more than 30 words, with lengths that don't fit, untranslated
    or in the wrong language.
    """
    pair = []
    for text in (source, target):
        if "<" in text or "&" in text and ";" in text:
            text = html.unescape(_TAG.sub(" ", text))
        text = unicodedata.normalize("NFC", text)
        pair.append(_SPACES.sub(" ", "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text)).strip())
    source, target = pair
    if {word for word in source.split() if "_" in word} & {word for word in target.split() if "_" in word}:
        return None  # a name in a program
    source, target = (_ACCELERATOR.sub("", text).rstrip(":.… ") + end for text, end in zip(pair, _ends(*pair)))
    if any(_PLACEHOLDER.search(text) or "_" in text or "~" in text for text in (source, target)):
        return None
    english, german = (_WORD.findall(text.lower()) for text in (source, target))
    if not (MIN_WORDS <= len(english) <= MAX_WORDS and len(german) <= MAX_WORDS and german
            and 0.4 <= len(target) / len(source) <= 2.5 and len(english) <= 3 * len(german) and len(german) <= 3 * len(english)):
        return None
    if not all(sum(map(str.isalpha, text)) > 0.6 * len(text) for text in (source, target)) or not source.isascii():
        return None
    if english == german or _foreign(english, _GERMAN, _ENGLISH) or _foreign(german, _ENGLISH, _GERMAN):
        return None
    return source, target


def _ends(source: str, target: str) -> tuple[str, str]:
    """A full stop where it ends both, or else nothing."""
    end = "." if all(text.endswith(".") and not text.endswith("..") for text in (source, target)) else ""
    return end, end


def _foreign(words: list[str], others: frozenset[str], own: frozenset[str]) -> bool:
    return sum(word in others for word in words) > sum(word in own for word in words)


# ---------------------------------------------------------------------------------------------------------------- splits

def skeleton(text: str) -> tuple[str, ...]:
    """The words in lower case, without digits and punctuation: what near-duplicates have in common."""
    return tuple(_WORD.findall(text.lower()))


def shadows(text: str) -> set[tuple[str, ...]]:
    """The skeleton and, where it has four words or more, what is left of it without one of them. Sentences that differ by a
    word more, less, other, or in another place have one in common."""
    words = skeleton(text)
    return {words, *(words[:i] + words[i + 1:] for i in range(len(words)) if len(words) > 3)}


def split(pairs: Iterable[tuple[str, str]], percent: Mapping[str, int]) -> Corpus:
    """Divide pairs into training, validation and test ones.

    Of pairs whose sources have the same skeleton the first is kept. A hash of the skeleton says where it goes, whatever else
    there is. Pairs for validation and test go if a training source is the same but for a word, or a training target has the same skeleton.

    Arguments:
        pairs: sources and targets.
        percent: of "valid" and "test".
    """
    parts: dict[str, dict[tuple[str, ...], tuple[str, str]]] = {name: {} for name in SPLITS}
    for source, target in pairs:
        words = skeleton(source)
        place = int.from_bytes(hashlib.sha256(" ".join(words).encode()).digest()[:8], "big") % 100
        name = "test" if place < percent["test"] else "valid" if place < percent["test"] + percent["valid"] else "train"
        parts[name].setdefault(words, (source, target))
    train = Pairs(*map(list, zip(*parts["train"].values())))
    near, targets = {shadow for source in train.source for shadow in shadows(source)}, set(map(skeleton, train.target))
    others = [[pair for pair in parts[name].values() if not shadows(pair[0]) & near and skeleton(pair[1]) not in targets]
              for name in ("valid", "test")]
    return Corpus(train, *(Pairs([source for source, _ in part], [target for _, target in part]) for part in others))


def overlap(train: Pairs, part: Pairs, length: int = 4) -> float:
    """What fraction of the sources of ``length`` words or more is made of runs of so many words that training sources have."""
    def runs(text: str) -> set[tuple[str, ...]]:
        words = skeleton(text)
        return {words[i:i + length] for i in range(len(words) - length + 1)}

    known = set().union(*map(runs, train.source))
    long = [found for source in part.source if (found := runs(source))]
    return sum(found <= known for found in long) / len(long) if long else 0.0


# ---------------------------------------------------------------------------------------------------- Debian's catalogues

PACKAGES = {
    "anjuta-common": "2:3.34.0-8",
    "ardour-data": "1:7.3.0+ds0-1",
    "audacity-data": "3.2.4+dfsg-1",
    "darktable": "4.2.1-4",
    "digikam-data": "4:7.9.0-1",
    "evolution-common": "3.46.4-2+deb12u1",
    "filezilla-common": "3.63.0-1+deb12u3",
    "freeciv-data": "3.0.6-1+deb12u1",
    "gcc-12-locales": "12.2.0-14+deb12u1",
    "gimp-data": "2.10.34-1+deb12u10",
    "git": "1:2.39.5-0+deb12u3",
    "gnome-control-center-data": "1:43.6-2~deb12u1",
    "gnucash-common": "1:4.13-1",
    "gnumeric-common": "1.12.55-1",
    "gramps": "5.1.5-1",
    "inkscape": "1.2.2-2+deb12u1",
    "kdevelop-l10n": "4:22.12.2-1",
    "krita-l10n": "1:5.1.5+dfsg-2+deb12u1",
    "libgtk-3-common": "3.24.38-2~deb12u3",
    "libreoffice-l10n-de": "4:7.4.7-1+deb12u14",
    "pidgin-data": "2.14.12-1",
    "util-linux-locales": "2.38.1-5+deb12u3",
    "vlc-l10n": "3.0.24-0+deb12u1",
}
"""Packages of Debian 12 and the versions that ``SHA256`` is of."""

SHA256 = "650ffe2299229583c8efd37cfd5888d910c7c2e7f4094889805b6b2551e01faa"
"""Of the six files, one after the other in the order of ``SPLITS`` and ``LANGUAGES``."""

PACKAGES_BYTES = 140_000_000
_CATALOGUE = re.compile(r"/de(_DE)?/LC_MESSAGES/[^/]+\.mo$")


def prepare(cache: Path | None = None) -> Path:
    """The folder with the six files of the corpus from Debian's catalogues, which are fetched where they are missing.

    The newest versions of the packages that the machine's package lists know are taken. If they aren't those of ``PACKAGES``, the
    corpus is another one, which is said once and is no error.

    Arguments:
        cache: where to keep data sets; the user's cache folder by default.

    Raises:
        DatasetError: if the packages can't be had, or of the right versions came other sentences.
    """
    folder = (cache or platformdirs.user_cache_path("hvd_quant") / "datasets") / "gettext-en-de"
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["sha256"] == _checksum(folder) and (manifest["sha256"] == SHA256) == (manifest["packages"] == PACKAGES):
            return folder
    except (OSError, KeyError, ValueError):
        pass  # missing, or damaged, or made by another version of this file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="incomplete-") as name:
        scratch = Path(name)
        versions = _fetch(folder, scratch)
        write(split(filter(None, (clean(*pair) for pair in _catalogues(scratch))), {"test": 3, "valid": 2}), scratch)
        found = _checksum(scratch)
        if versions != PACKAGES:
            others = ", ".join(f"{name} {version} for {PACKAGES.get(name)}" for name, version in versions.items()
                               if version != PACKAGES.get(name))
            print(f"{folder.name}: the packages here are others than those that the documentation's figures were measured with: "
                  f"{others}; don't compare the figures", file=sys.stderr)
        elif found != SHA256:
            raise DatasetError(f"{folder.name} as it was made is not what it should be: its SHA-256 is {found}, expected "
                               f"{SHA256}")
        (scratch / "manifest.json").write_text(json.dumps({"sha256": found, "packages": versions}, indent=1) + "\n")
        for file in (*FILES, "manifest.json"):  # which comes last: without it nothing counts
            os.replace(scratch / file, folder / file)
    return folder


def _fetch(folder: Path, scratch: Path) -> dict[str, str]:
    """Put the packages into ``scratch``, and say which versions they are."""
    if shutil.which("dpkg-deb") is None:
        raise DatasetError("The English-German sentences come from Debian packages, and there is no dpkg-deb here. Give texts of your "
                           "own with --train-src, --train-tgt and so on, or copy the folder from a Debian machine's cache to "
                           f"{folder}")
    download(["apt-get", "download", "-q", *PACKAGES], scratch, PACKAGES_BYTES, "English-German",
             "It takes the packages of Debian 12 (apt-get update first where package lists are missing); elsewhere give texts of "
             "your own with --train-src, --train-tgt and so on")
    shown = (subprocess.check_output(["dpkg-deb", "--show", package], text=True) for package in scratch.glob("*.deb"))
    return dict(sorted(line.strip().split("\t") for line in shown))


def _catalogues(scratch: Path) -> Iterator[tuple[str, str]]:
    """All messages of the German catalogues in the packages of ``scratch``, in one order; nothing else is unpacked."""
    for package in sorted(scratch.glob("*.deb")):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as unpacker:
            found = {}
            with tarfile.open(fileobj=unpacker.stdout, mode="r|") as archive:
                for member in archive:
                    if member.isfile() and _CATALOGUE.search(member.name):
                        found[member.name] = archive.extractfile(member).read()
        if unpacker.returncode:
            raise DatasetError(f"{package.name} is damaged: dpkg-deb can't unpack it. Start again")
        for name, data in sorted(found.items()):
            yield from read_mo(data, f"{package.name}: {name}")


# ------------------------------------------------------------------------------------------------------------ text files

FILES = [f"{part}.{language}" for part in SPLITS for language in LANGUAGES]


def write(corpus: Corpus, folder: Path) -> None:
    """Write the six files, a sentence a line."""
    for part in SPLITS:
        pairs = getattr(corpus, part)
        for language, lines in zip(LANGUAGES, (pairs.source, pairs.target)):
            (folder / f"{part}.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(source: Path, target: Path) -> Pairs:
    """Two text files with a sentence a line, the n-th of one the translation of the n-th of the other.

    Raises:
        DatasetError: if they have no lines, or not as many.
    """
    try:
        pairs = Pairs(*(path.read_text(encoding="utf-8").split("\n") for path in (source, target)))
    except UnicodeDecodeError as error:
        raise DatasetError(f"{source} or {target} is no UTF-8 text: {error}") from error
    for lines in (pairs.source, pairs.target):
        if lines[-1] == "":
            lines.pop()
    if not len(pairs) or len(pairs.source) != len(pairs.target):
        raise DatasetError(f"{source} has {len(pairs.source)} lines and {target} has {len(pairs.target)}; expected as many, a "
                           "sentence and its translation in each")
    return pairs


def load(folder: Path) -> Corpus:
    """Read the six files of a folder."""
    return Corpus(*(read(*(folder / f"{part}.{language}" for language in LANGUAGES)) for part in SPLITS))


def _checksum(folder: Path) -> str:
    return hashlib.sha256(b"".join((folder / file).read_bytes() for file in FILES)).hexdigest()


def main() -> None:
    """Say what there is, as docs/translation.md does."""
    corpus = load(prepare())
    for part in SPLITS:
        pairs = getattr(corpus, part)
        english, german = (sum(len(skeleton(line)) for line in lines) / len(pairs) for lines in (pairs.source, pairs.target))
        print(f"{part}: {len(pairs):,} pairs, {english:.1f} English and {german:.1f} German words in the mean, "
              f"{100 * overlap(corpus.train, pairs):.1f} % of the sources in pieces of 4 words in training")


if __name__ == "__main__":
    main()
