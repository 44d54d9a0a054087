"""Reading weight files: safetensors (one or many), Meta's .pth (one or many shards), GGUF.

Every reader has `names()`, `shape(name, wanted)`, `read(name, wanted)` and `release()`, which lets
go of the mapped file so that pages already read do not stay in memory. `wanted` is the shape that
the model needs: only it tells how Meta's shards join. Nothing is unpickled but tensors.
"""

import gc
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

RELEASES = 32  # how often a .pth is let go and opened again while it is read


class SafetensorsReader:
    """One model.safetensors, or the shards that an index names."""

    owned = True

    def __init__(self, folder):
        folder = Path(folder)
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            self.files = self._files_of_index(folder, index)
        elif single.exists():
            self.files = dict.fromkeys(self._names(single), single)
        else:
            raise FileNotFoundError(
                f"{folder} holds no model.safetensors and no model.safetensors.index.json"
            )
        self.open = {}

    @staticmethod
    def _names(file):
        try:
            with safe_open(file, "pt") as opened:
                return list(opened.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or no safetensors file: {error}") from error

    def _files_of_index(self, folder, index):
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            shards = {name: str(shard) for name, shard in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of a sharded checkpoint: {error!r}") from error
        for shard in set(shards.values()):
            if Path(shard).name != shard:
                raise ValueError(f"{index} names {shard!r}, which is not a file of its own folder")
            if not (folder / shard).exists():
                raise FileNotFoundError(f"{index} names {shard}, which is missing from {folder}")
        held = {
            name: folder / shard
            for shard in set(shards.values())
            for name in self._names(folder / shard)
        }
        for name, shard in shards.items():
            if held.get(name) != folder / shard:
                raise ValueError(f"{index} says that {name} is in {shard}; it is not")
        return held

    def _handle(self, name):
        file = self.files[name]
        if file not in self.open:
            self.open[file] = safe_open(file, "pt")
        return self.open[file]

    def names(self):
        return list(self.files)

    def shape(self, name, wanted):
        return tuple(self._handle(name).get_slice(name).get_shape())

    def is_float(self, name):
        return self._handle(name).get_slice(name).get_dtype() in ("F64", "F32", "F16", "BF16")

    def read(self, name, wanted, dtype=None):
        return self._handle(name).get_tensor(name)

    def release(self):
        self.open.clear()


class MetaReader:
    """Meta's consolidated.NN.pth: each shard has a slice of every matrix and all of every norm."""

    owned = True

    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("consolidated.*.pth"))
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
                if not all(isinstance(tensor, torch.Tensor) for tensor in shard.values()):
                    raise TypeError("it holds something that is no tensor")
            except Exception as error:  # it asks for code, is cut short, or is something else
                raise ValueError(
                    f"{file} is no plain .pth of tensors: {str(error).splitlines()[0]}"
                ) from error
            self.open.append(shard)
        return self.open

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
    """A GGUF file of architecture llama; quantised blocks are turned back into float32."""

    owned = True

    def __init__(self, path):
        import gguf  # slow to import, and seldom needed

        self.path, self.gguf = Path(path), gguf
        try:
            self.reader = gguf.GGUFReader(str(path))
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{path} is damaged or no GGUF file: {error}") from error
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def field(self, key, default=None):
        """One entry of the file's metadata."""
        found = self.reader.fields.get(key)
        return default if found is None else found.contents()

    def names(self):
        return list(self.tensors)

    def shape(self, name, wanted):
        return tuple(
            int(n) for n in self.tensors[name].shape[::-1]
        )  # GGUF counts axes from the fastest

    def is_float(self, name):
        return True  # blocks of small integers are turned back into floats

    def read(self, name, wanted, dtype=None):
        tensor = self.tensors[name]
        try:
            values = self.gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: {name} is of type {tensor.tensor_type.name}, which cannot be read"
            ) from error
        return torch.from_numpy(values) if values.flags.writeable else torch.tensor(values)

    def release(self):
        pass
