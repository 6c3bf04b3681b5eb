"""Write token ids and document starts to shards, and read the index of a folder of shards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxgpt.data.encode import Tokenizer
from jaxgpt.data.special import GENERATION, TOKENIZER
from jaxgpt.data.tokenizer import load_tokenizer, make_tokenizer
from jaxgpt.data.tokens import HEADER, LLMC, is_token_path
from jaxgpt.errors import UserError
from jaxgpt.files import read_json

INDEX, TOKENIZER_FILE = "index.json", "tokenizer.json"
KIND = "jaxgpt token shards"  # the value of "kind" in index.json
PART = ".part"  # suffix of the files of an unfinished shard
STARTS = np.dtype("<u8")
SPLITS = ("train", "val")
PROBE = "It's 1,234 o'clock\n\n\tin the  café -- don't <|endoftext|> 東京 we'll\r\n"  # distinguishes tokenizers
Format = Literal["llm.c", "nanogpt"]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of ids in files: uint16 if all ids fit, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes one split: files of ids, each with a file of the positions at which documents start.

    In the format of llm.c, each file except the last has exactly `shard_tokens` ids, and documents continue from one file to
    the next. In nanoGPT's format there is one file without a header.

    Attributes:
        shards: finished shards, as in index.json.
        documents: documents of the split so far.
        size: bytes of their text so far.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], style: Format, shard_tokens: int) -> None:
        self.shards = list[dict[str, Any]]()
        self.documents, self.size = 0, 0
        self._folder, self._split, self._dtype, self._style = folder, split, dtype, style
        self._limit = shard_tokens if style == "llm.c" else 1 << 62
        self._tokens, self._starts = 0, 0  # of the unfinished shard
        self._files: tuple[FileIO, FileIO] | None = None

    @property
    def tokens(self) -> int:
        """Ids written so far."""
        return sum(shard["tokens"] for shard in self.shards) + self._tokens

    def write(self, ids: np.ndarray, starts: np.ndarray, size: int) -> None:
        """Append ids.

        Args:
            ids: of the type given.
            starts: increasing indices into `ids` at which documents start.
            size: bytes of the text of the ids.
        """
        self.documents, self.size = self.documents + len(starts), self.size + size
        while len(ids):
            taken, begun = ids[: self._limit - self._tokens], starts[starts < self._limit - self._tokens]
            data, positions = self._opened()
            _write(data, taken)
            _write(positions, (begun + self._tokens).astype(STARTS))
            ids, starts = ids[len(taken) :], starts[len(begun) :] - len(taken)
            self._tokens, self._starts = self._tokens + len(taken), self._starts + len(begun)
            if self._tokens == self._limit:
                self.finish()

    def finish(self) -> None:
        """Finish the shard, if any ids have been written to it."""
        if self._files is None:
            return
        data, positions = self._files
        if self._style == "llm.c":
            header = np.zeros(HEADER, "<i4")
            magic = next(magic for magic, (_, dtype) in LLMC.items() if dtype == self._dtype)
            header[:3] = magic, LLMC[magic][0], self._tokens
            data.seek(0)
            _write(data, header)
        shard: dict[str, Any] = {"file": self._path().name, "tokens": self._tokens, "documents": self._starts}
        for key, file, path in (("sha256", data, self._path()), ("starts_sha256", positions, self._path(".starts"))):
            os.fsync(file.fileno())
            file.close()
            shard[key] = file_sha256(_part(path))
            os.replace(_part(path), path)
        self.shards.append(shard)
        self._tokens, self._starts, self._files = 0, 0, None

    def save(self) -> dict[str, Any]:
        """Write everything to disk, and return what `restore` needs."""
        for file in self._files or ():
            os.fsync(file.fileno())
        return self.facts() | {"unfinished": {"tokens": self._tokens, "documents": self._starts}}

    def facts(self) -> dict[str, Any]:
        """Return the entry of the split in index.json."""
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.size, "shards": self.shards}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue after `save`, in a new process. Deletes what was written after it.

        Raises:
            UserError: the files are not those that were saved.
        """
        self.documents, self.size, self.shards = saved["documents"], saved["bytes"], list(saved["shards"])
        self._tokens, self._starts = saved["unfinished"]["tokens"], saved["unfinished"]["documents"]
        for shard in self.shards:
            if not (self._folder / shard["file"]).is_file():
                raise UserError(f"{self._folder / shard['file']} is missing: delete {self._folder} and start again")
        for path in (self._path(), self._path(".starts")):
            if path.exists() and not _part(path).exists():  # it was finished after `save`
                os.replace(path, _part(path))
        kept = {shard["file"] for shard in self.shards}
        kept |= {Path(name).with_suffix(".starts").name for name in kept}
        if self._tokens:
            data, positions = self._opened()
            for file, size in (
                (data, self._offset() + self._tokens * self._dtype.itemsize),
                (positions, self._starts * STARTS.itemsize),
            ):
                if os.fstat(file.fileno()).st_size < size:
                    raise UserError(
                        f"{file.name} is shorter than index.json says: delete {self._folder} and start again"
                    )
                file.truncate(size)
                file.seek(size)
            kept |= {_part(self._path()).name, _part(self._path(".starts")).name}
        for path in [*self._folder.glob(f"{self._split}*.bin*"), *self._folder.glob(f"{self._split}*.starts*")]:
            if path.name not in kept:
                path.unlink()

    def close(self) -> None:
        """Close the files of the unfinished shard."""
        for file in self._files or ():
            file.close()

    def _offset(self) -> int:
        return 4 * HEADER if self._style == "llm.c" else 0

    def _path(self, suffix: str = ".bin") -> Path:
        number = f"_{len(self.shards):06d}" if self._style == "llm.c" else ""
        return self._folder / f"{self._split}{number}{suffix}"

    def _opened(self) -> tuple[FileIO, FileIO]:
        if self._files is None:
            paths = (_part(self._path()), _part(self._path(".starts")))
            flag = os.O_RDWR | os.O_CREAT
            data, positions = (FileIO(path, "r+", opener=lambda p, _: os.open(p, flag, 0o644)) for path in paths)
            if not self._tokens:
                data.truncate(0)
                positions.truncate(0)
                _write(data, np.zeros(self._offset(), np.uint8))
            self._files = data, positions
        return self._files


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _write(file: FileIO, array: np.ndarray) -> None:
    left = memoryview(array.tobytes())
    try:
        while len(left):
            left = left[file.write(left) :]
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(file.name)) from None


def file_sha256(path: Path) -> str:
    """Hash a file: SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, through a file of the same name with the suffix `.part`."""
    data = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
    try:
        with _part(path).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(_part(path), path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write a tokenizer to a folder, with the files that name its special tokens, and return its entry in index.json.

    Replaces those of another tokenizer.
    """
    special = tokenizer.special
    for name, content in ((GENERATION, special.generation), (TOKENIZER, special.tokenizer)):
        (folder / name).unlink(missing_ok=True)
        if content:
            write_json(folder / name, content)
    path = folder / TOKENIZER_FILE
    part = _part(path)
    part.write_text(tokenizer.to_json(), "utf-8")
    os.replace(part, path)
    return {"file": TOKENIZER_FILE, "sha256": file_sha256(path), "vocab_size": tokenizer.vocab_size}


@dataclass(frozen=True)
class Prepared:
    """A folder written by `jaxgpt data prepare`.

    Attributes:
        folder: the folder.
        index: the content of its index.json.
    """

    folder: Path
    index: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return int(self.index["tokenizer"]["vocab_size"])

    @property
    def tokenizer_path(self) -> Path:
        """Path of the tokenizer.json."""
        return self.folder / TOKENIZER_FILE

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the ids.

        Raises:
            UserError: it is not the one that made the ids.
        """
        path = self.tokenizer_path
        if not path.is_file() or file_sha256(path) != self.index["tokenizer"]["sha256"]:
            raise UserError(f"{path} is missing or not the tokenizer of {self.folder / INDEX}: prepare the data again")
        return load_tokenizer(path)

    def check(self, checksums: bool = False) -> None:
        """Compare the index with the files that it names, by their sizes, or by their checksums too.

        Raises:
            UserError: they differ.
        """
        itemsize = np.dtype(self.index["dtype"]).itemsize
        offset = 4 * HEADER if self.index["format"] == "llm.c" else 0
        named = set[str]()
        for shards in (self.index["splits"][split]["shards"] for split in SPLITS):
            for shard in shards:
                path = self.folder / shard["file"]
                starts = path.with_suffix(".starts")
                named.add(path.name)
                for file, size, sha256 in (
                    (path, offset + shard["tokens"] * itemsize, shard["sha256"]),
                    (starts, shard["documents"] * STARTS.itemsize, shard["starts_sha256"]),
                ):
                    found = file.stat().st_size if file.is_file() else None
                    if found != size:
                        has = "is missing" if found is None else f"has {found:,} bytes"
                        self._contradiction(f"{file} {has}, but {INDEX} says {size:,} bytes")
                    if checksums and file_sha256(file) != sha256:
                        self._contradiction(f"{file} does not have the SHA-256 in {INDEX}")
        if others := sorted({path.name for path in self.folder.glob("[!.]*.bin")} - named):
            self._contradiction(f"{self.folder / others[0]} is not in {INDEX}")
        for split in SPLITS:
            facts = self.index["splits"][split]
            for key in ("tokens", "documents"):
                if sum(shard[key] for shard in facts["shards"]) != facts[key]:
                    self._contradiction(f"{self.folder / INDEX}: the {key} of the {split} shards do not add up")

    def _contradiction(self, what: str) -> None:
        raise UserError(f"{what}: prepare the data again, or delete {INDEX} to read the .bin files without it")


def find_prepared(path: Path) -> Prepared | None:
    """Open a folder written by `jaxgpt data prepare`, and check its index against the sizes of its files.

    Returns:
        None if the path is not such a folder.

    Raises:
        UserError: the index is damaged or contradicts the files, or the folder is not finished.
    """
    index = read_index(path)
    if index is None:
        return None
    if not index.get("complete"):
        raise UserError(f"{path} is not finished: run its jaxgpt data prepare command again, which resumes it")
    prepared = Prepared(path, index)
    try:
        prepared.check()
        return prepared if prepared.vocab_size else None
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path / INDEX} is damaged ({type(e).__name__}: {e}): prepare the data again") from None


def read_index(path: Path) -> dict[str, Any] | None:
    """Read the index.json of a folder; None if there is none, or one that something else has written."""
    if not (path / INDEX).is_file():
        return None
    index = read_json(path / INDEX)
    return index if index.get("kind") == KIND else None


def holds_ids(path: Path) -> bool:
    """Return whether a path is a token file, a folder of them (`is_token_path`), or one written by `jaxgpt data prepare`.

    Raises:
        UserError: as `find_prepared`.
    """
    return find_prepared(path) is not None or is_token_path(path)


def prepared_tokenizer(path: Path, kind: str, tokenizer: Tokenizer | None = None) -> Tokenizer | None:
    """Return the tokenizer of a folder written by `jaxgpt data prepare`; None if the path is not such a folder.

    Args:
        path: the data.
        kind: `data.tokenizer`. Kinds that are built from a text (char, word and bpe) do not matter; others must agree.
        tokenizer: an existing tokenizer, such as that of a resumed run, which must agree.

    Raises:
        UserError: another tokenizer than that of the index is asked for, or the index contradicts the files.
    """
    prepared = find_prepared(path)
    if prepared is None:
        return None
    own, name = prepared.tokenizer_path, "the tokenizer of the model" if tokenizer else f"data.tokenizer {kind}"
    if tokenizer is None and kind not in ("char", "word", "bpe", prepared.index["tokenizer"]["name"], str(own)):
        if kind == "ids":
            raise UserError(f"{path} has a tokenizer, {own}: leave out --data.tokenizer ids")
        tokenizer = make_tokenizer(kind, "", 0, 0)
    if tokenizer is not None and not same_ids(tokenizer, prepared.tokenizer):
        raise UserError(
            f"{path} was prepared with another tokenizer ({prepared.index['tokenizer']['name']}, {TOKENIZER_FILE}) than "
            f"{name}: leave out --data.tokenizer, or prepare the data with this tokenizer"
        )
    return tokenizer or prepared.tokenizer


def same_ids(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether two tokenizers give the same ids: equal files, or equal vocabularies and merges that agree on a probe."""
    texts = a.to_json(), b.to_json()
    if texts[0] == texts[1]:
        return True
    models = [json.loads(text)["model"] for text in texts]
    if any(models[0].get(key) != models[1].get(key) for key in ("type", "vocab", "merges")):
        return False
    try:
        return np.array_equal(a.encode(PROBE), b.encode(PROBE))
    except UserError:  # a character or word outside both vocabularies
        return True


def document_starts(folder: Path) -> dict[str, list[np.ndarray]]:
    """Map the starts of the documents in each shard of a folder written by `jaxgpt data prepare`.

    Returns:
        For `train` and `val`, one uint64 array for each shard, in order: the indices, within the shard, of the first id of
        each document. In the format of llm.c this is the end-of-text id before the text. A document that continues from the
        shard before has no start in this one.

    Raises:
        UserError: as `find_prepared`, or the folder has no index.
    """
    prepared = find_prepared(folder)
    if prepared is None:
        raise UserError(f"{folder} has no {INDEX} of jaxgpt data prepare, which holds the document starts")

    def read(shard: Mapping[str, Any]) -> np.ndarray:
        path = (folder / shard["file"]).with_suffix(".starts")
        return np.memmap(path, STARTS, "r") if shard["documents"] else np.zeros(0, STARTS)

    return {split: [read(shard) for shard in prepared.index["splits"][split]["shards"]] for split in SPLITS}
