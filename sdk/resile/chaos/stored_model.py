"""The sha256 of a stored model, computed from its file alone, as `params_sha256` defines it."""

import hashlib
import json
from pathlib import Path

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def stored_sha256(file: Path) -> str:
    """Return the sha256 of the tensors of a safetensors file. Raises ValueError if it is not one."""
    with file.open("rb") as model:
        header = json.loads(model.read(int.from_bytes(model.read(8), "little")))
        data = model.tell()
        header.pop("__metadata__", None)
        sha = hashlib.sha256()
        for name in sorted(header):
            tensor = header[name]
            shape = ",".join(map(str, tensor["shape"]))
            sha.update(f"{name}\0{_DTYPES[tensor['dtype']]}\0{shape}\0".encode())
            begin, end = tensor["data_offsets"]
            model.seek(data + begin)
            sha.update(model.read(end - begin))
    return sha.hexdigest()
