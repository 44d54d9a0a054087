"""Reading weight files: safetensors (one or many), Meta's .pth (one or many shards), GGUF.

Every reader has `names()`, `shape(name, wanted)`, `read(name, wanted)` and `release()`, which lets
go of the mapped file so that pages already read do not stay in memory. `wanted` is the shape that
the model needs: only it tells how Meta's shards join. Nothing is unpickled but tensors. No file is
trusted: its header is checked against its size before anything is allocated, and numbers that are
not finite are refused.
"""

import gc
import json
import math
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

RELEASES = 32  # how often a .pth is let go and opened again while it is read
TEXT_LIMIT = 2**22  # bytes of a JSON file or header; that of Llama 3.1 405B is below 0.2 MB
GGUF_LIMIT = 2**26  # bytes of a GGUF header, which holds a tokenizer: 8 MB for Llama 3
LIST_LIMIT = 2**21  # entries of all lists in it; Llama 3's three have 536,659
SMALL_LIMIT = 2**26  # bytes of a tokenizer's file; that of Llama 3 has 9 MB
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2}
BYTES |= {"BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}


def require_small(path):
    """Refuse with ValueError a tokenizer's file that is larger than any real one."""
    if (size := Path(path).stat().st_size) > SMALL_LIMIT:
        raise ValueError(f"{path} has {size:,} bytes, more than any tokenizer's file")


def read_json(path):
    """The object in a JSON file.

    Errors   ValueError names the file: no JSON, not one object, a key twice, larger than any real
             one
    """
    path = Path(path)
    if path.stat().st_size > TEXT_LIMIT:
        raise ValueError(f"{path} is no JSON of a model: it has {path.stat().st_size:,} bytes")
    return parse_json(path.read_bytes(), path)


def parse_json(raw, where):
    def once(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"{twice[:80]!r} is there twice")
        return found

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        hint = web_page_hint(raw)
        raise ValueError(f"{where} is no JSON{hint}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} must hold one JSON object, not {type(found).__name__}")
    return found


def looks_like_a_web_page(path):
    with open(path, "rb") as file:
        return bool(web_page_hint(file.read(512)))


def web_page_hint(raw):
    """What a file of a wrong kind seems to be instead."""
    start = bytes(raw[:512]).lstrip().lower()
    if start.startswith((b"<!doctype", b"<html")):
        return " (it is a web page, perhaps a network's login page)"
    if start.startswith(b"version https://git-lfs"):
        return " (it only points to a file of Git LFS: run git lfs pull)"
    return ""


def refuse_not_finite(tensor, name, file):
    """Refuse a tensor that holds NaN or infinity; no copy of it is made."""
    if tensor.dtype in FLOATS and tensor.numel():
        low, high = tensor.aminmax()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"{file}: {name} holds numbers that are not finite (NaN or infinity)")
    return tensor


def shards_of(index):
    """The files that model.safetensors.index.json names: a set, each in the index's own folder."""
    return set(weight_map(index).values())


def weight_map(index):
    """Tensor name -> shard of a model.safetensors.index.json."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index} is no index of a sharded checkpoint: it has no weight_map")
    for shard in found.values():
        inside = isinstance(shard, str) and shard == Path(shard).name and "\\" not in shard
        if not inside or not shard.isprintable() or not shard.endswith(".safetensors"):
            raise ValueError(f"{index} names {shard!r}, which is not a file of its own folder")
    return found


def safetensors_header(file):
    """The checked header of a safetensors file: name -> (dtype, shape).

    Errors   ValueError unless every tensor has its bytes, and the file no others
    """
    size, bad = Path(file).stat().st_size, f"{file} is damaged or no safetensors file"
    with open(file, "rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, TEXT_LIMIT):
            hint = web_page_hint(start + opened.read(512))
            raise ValueError(f"{bad}{hint}: its header claims {length:,} of {size:,} bytes")
        header = parse_json(opened.read(length), f"{bad}: its header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{bad}: its __metadata__ is no table of texts")
    found, pieces = {}, []
    for name, entry in header.items():
        dtype, shape, ends = (
            [entry.get(key) for key in ("dtype", "shape", "data_offsets")]
            if isinstance(entry, dict)
            else [None] * 3
        )
        if not (
            name.isprintable()
            and isinstance(dtype, str)
            and dtype in BYTES
            and _whole_numbers(shape)
            and _whole_numbers(ends)
            and len(ends) == 2
        ):
            raise ValueError(f"{bad}: its entry of {name[:80]!r} is {str(entry)[:120]}")
        if ends[1] - ends[0] != math.prod(shape) * BYTES[dtype]:
            raise ValueError(f"{bad}: {name[:80]} {shape} has bytes {ends[0]} to {ends[1]}")
        found[name] = (dtype, tuple(shape))
        pieces.append((*ends, name))
    at = 0
    for begin, end, name in sorted(pieces):
        if begin != at:
            what = "overlaps the tensor before" if begin < at else "leaves a hole"
            raise ValueError(f"{bad}: {name[:80]} begins at byte {begin} and {what}")
        at = end
    if at != size - 8 - length:
        raise ValueError(f"{bad}: its tensors have {at:,} bytes, the file {size - 8 - length:,}")
    return found


def _whole_numbers(values):
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)


class SafetensorsReader:
    """One model.safetensors, or the shards that an index names."""

    owned = True

    def __init__(self, folder):
        folder = Path(folder)
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        self.open, self.headers = {}, {}
        if index.exists():
            self.files = self._files_of_index(folder, index)
        elif single.exists():
            self.files = dict.fromkeys(self._header(single), single)
        else:
            raise FileNotFoundError(
                f"{folder} holds no model.safetensors and no model.safetensors.index.json"
            )

    def _header(self, file):
        if file not in self.headers:
            self.headers[file] = safetensors_header(file)
        return self.headers[file]

    def _files_of_index(self, folder, index):
        shards = weight_map(index)
        held = {}
        for shard in sorted(set(shards.values())):
            if not (folder / shard).exists():
                raise FileNotFoundError(f"{index} names {shard}, which is missing from {folder}")
            for name in self._header(folder / shard):
                if name in held:
                    raise ValueError(f"{name} is in {held[name].name} and in {shard}")
                held[name] = folder / shard
        for name, shard in shards.items():
            if held.get(name) != folder / shard:
                raise ValueError(f"{index} says that {name} is in {shard}; it is not")
        return held

    def names(self):
        return list(self.files)

    def shape(self, name, wanted):
        return self._header(self.files[name])[name][1]

    def is_float(self, name):
        return self._header(self.files[name])[name][0] in ("F64", "F32", "F16", "BF16")

    def read(self, name, wanted, dtype=None):
        file = self.files[name]
        try:
            if file not in self.open:
                self.open[file] = safe_open(file, "pt")
            tensor = self.open[file].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or no safetensors file: {error}") from error
        return refuse_not_finite(tensor, name, file)

    def release(self):
        self.open.clear()


class MetaReader:
    """Meta's consolidated.NN.pth: each shard has a slice of every matrix and all of every norm.

    path   their folder, one of them, or another .pth, which is then the only one
    """

    owned = True

    def __init__(self, path):
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        self.files = sorted(folder.glob("consolidated.*.pth"))
        if path.is_file() and path not in self.files:
            self.files = [path]
        if not self.files:
            raise FileNotFoundError(f"{folder} holds no consolidated.00.pth")
        self.open, self.bytes_read = [], 0
        shards = self._shards()
        names = {name for shard in shards for name in shard}
        for file, shard in zip(self.files, shards, strict=True):
            if lacking := sorted(names - set(shard)):
                raise ValueError(f"{file} lacks {lacking[0]}, which another shard has")

    def _shards(self):
        for file in self.files[len(self.open) :]:
            try:
                shard = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
                self._check(file, shard)
            except Exception as error:  # it asks for code, is cut short, or is something else
                said = (str(error) or type(error).__name__).splitlines()[0]
                raise ValueError(
                    f"{file} is no plain .pth of tensors{self._hint(file)}: {said}"
                ) from error
            self.open.append(shard)
        return self.open

    @staticmethod
    def _hint(file):
        with open(file, "rb") as opened:
            return web_page_hint(opened.read(512))

    @staticmethod
    def _check(file, shard):
        """Only named, dense tensors, and together no more bytes than the file has.

        Tied tensors share one storage, as in Meta's Llama 3.2 1B and 3B: it counts once.
        """
        storages = {}
        for name, tensor in shard.items():
            if not isinstance(name, str) or not name.isprintable():
                raise TypeError(f"{str(name)[:80]!r} is no name of a tensor")
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} is no tensor, but {type(tensor).__name__}")
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                raise TypeError(f"{name} is no dense tensor with its numbers in the file")
            storage = tensor.untyped_storage()
            if tensor.nbytes > storage.nbytes():
                raise ValueError(f"{name} claims {tensor.nbytes:,} bytes, the file has fewer")
            storages[storage.data_ptr()] = storage.nbytes()
        if (total := sum(storages.values())) > file.stat().st_size:
            raise ValueError(f"its tensors claim {total:,} bytes, the file has fewer")

    def names(self):
        return list(self._shards()[0])

    def shape(self, name, wanted):
        shapes = [tuple(shard[name].shape) for shard in self._shards()]
        return wanted if _joining_axis(shapes, wanted) is not None else shapes[0]

    def is_float(self, name):
        return all(shard[name].is_floating_point() for shard in self._shards())

    def count(self, name):
        """Numbers in all shards of a tensor together."""
        return sum(shard[name].numel() for shard in self._shards())

    def read(self, name, wanted, dtype=None):
        parts = [shard[name] for shard in self._shards()]
        self.bytes_read += sum(part.nbytes for part in parts)
        for part in parts:
            refuse_not_finite(part, name, self.files[0].parent)
        if len(parts) == 1:
            return parts[0]
        axis = _joining_axis([tuple(part.shape) for part in parts], wanted)
        joined = torch.empty(wanted, dtype=dtype or parts[0].dtype)
        if axis == -1:
            joined.copy_(parts[0])
        else:  # straight into the dtype asked for: no second copy of the whole
            sizes = [part.shape[axis] for part in parts]
            for place, part in zip(joined.split(sizes, axis), parts, strict=True):
                place.copy_(part)
            del place, part
        del parts
        self.release()  # nothing of the map is in use any more
        return joined

    def release(self):
        if self.bytes_read > sum(file.stat().st_size for file in self.files) / RELEASES:
            self.open, self.bytes_read = [], 0
            gc.collect()  # torch.load leaves the map in a reference cycle


def _joining_axis(shapes, wanted):
    """The axis along which shards of these shapes make up `wanted`.

    It is -1 if each shard is the whole, None if they do not make it up.
    """
    if all(shape == wanted for shape in shapes):
        return -1
    for axis in range(len(wanted)):
        rest = {
            (*shape[:axis], *shape[axis + 1 :]) for shape in shapes if len(shape) == len(wanted)
        }
        if (
            rest == {(*wanted[:axis], *wanted[axis + 1 :])}
            and sum(shape[axis] for shape in shapes) == wanted[axis]
        ):
            return axis
    return None


class GGUFReader:
    """A GGUF file of architecture llama; quantised blocks are turned back into float32.

    Source   the GGUF specification in ggml's documentation, versions 2 and 3
    """

    owned = True

    def __init__(self, path):
        import gguf  # slow to import, and seldom needed

        self.path, self.gguf = Path(path), gguf
        with open(path, "rb") as file:
            hint = web_page_hint(file.read(512))
        try:
            self.data = np.asarray(np.memmap(path, mode="r"))
            self.view, self.end = memoryview(self.data), min(len(self.data), GGUF_LIMIT)
            self.at, self.entries, self.fields, self.tensors = 0, 0, {}, {}
            self._read_header()
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path} is damaged or no GGUF file{hint}: {error}") from error

    def _read_header(self):
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are known")
        n_tensors, n_fields = self._number("Q"), self._number("Q")
        if max(n_tensors, n_fields) > 2**16:
            raise ValueError(f"it claims {n_tensors:,} tensors and {n_fields:,} fields")
        for _ in range(n_fields):
            key = self._new_name(self.fields)
            self.fields[key] = self._value(self._number("I"))
        places = [(self._new_name(self.tensors), self._place()) for _ in range(n_tensors)]
        alignment = self.field("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment < 2**20:
            raise ValueError(f"general.alignment is {alignment!r}")
        start, end = -(-self.at // alignment) * alignment, 0
        for name, (shape, kind, offset, size) in sorted(places, key=lambda place: place[1][2]):
            if offset < end or start + offset + size > len(self.data):
                raise ValueError(f"{name} overlaps another tensor or lies outside the file")
            end = offset + size
            self.tensors[name] = (shape, kind, start + offset, size)

    def _take(self, count):
        if count > self.end - self.at:
            raise ValueError(f"its header claims {count:,} bytes more at byte {self.at:,}")
        self.at += count
        return bytes(self.view[self.at - count : self.at])

    def _number(self, letter):
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(letter)))[0]

    def _text(self):
        return self._take(int.from_bytes(self._take(8), "little")).decode("utf-8")

    def _new_name(self, known):
        name = self._text()
        if name in known or not name.isprintable():
            raise ValueError(f"the name {name[:80]!r} is there twice or is no name")
        known[name] = None
        return name

    def _value(self, kind):
        """One value of a field; kinds 0 to 12 are those of the specification."""
        if kind == 8:
            return self._text()
        if kind == 9:
            kind, count = self._number("I"), self._number("Q")
            self.entries += count
            if self.entries > LIST_LIMIT or kind == 9:
                raise ValueError(f"a list in its header claims {count:,} entries of kind {kind}")
            if kind == 8:
                return [self._text() for _ in range(count)]
            numbers = np.dtype(self._letter(kind)).newbyteorder("<")
            return np.frombuffer(self._take(count * numbers.itemsize), numbers).tolist()
        return self._number(self._letter(kind))

    @staticmethod
    def _letter(kind):
        """The letter of a kind of numbers, which struct and NumPy share."""
        if kind > 12:
            raise ValueError(f"a field is of kind {kind}")
        return "BbHhIif?__Qqd"[kind]

    def _place(self):
        """Shape, type, offset and bytes of one tensor, as its entry in the header says."""
        if (n_axes := self._number("I")) > 4:
            raise ValueError(f"a tensor has {n_axes} axes")
        shape = tuple(self._number("Q") for _ in range(n_axes))[::-1]  # GGUF has the fastest first
        kind = self.gguf.GGMLQuantizationType(self._number("I"))
        offset = self._number("Q")
        block, block_bytes = self.gguf.GGML_QUANT_SIZES[kind]
        if not math.prod(shape) or not shape or shape[-1] % block:
            raise ValueError(f"a tensor of shape {shape} is no whole blocks of {kind.name}")
        return shape, kind, offset, math.prod(shape) // block * block_bytes

    def field(self, key, default=None):
        """One entry of the file's metadata."""
        return self.fields.get(key, default)

    def names(self):
        return list(self.tensors)

    def shape(self, name, wanted):
        return self.tensors[name][0]

    def is_float(self, name):
        return True  # blocks of small integers are turned back into floats

    def read(self, name, wanted, dtype=None):
        shape, kind, start, size = self.tensors[name]
        rows = self.data[start : start + size].reshape(*shape[:-1], -1)
        try:
            values = self.gguf.quants.dequantize(np.asarray(rows), kind)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(
                f"{self.path}: {name} is of type {kind.name}, which cannot be read"
            ) from error
        tensor = torch.from_numpy(values) if values.flags.writeable else torch.tensor(values)
        return refuse_not_finite(tensor, name, self.path)

    def release(self):
        pass
