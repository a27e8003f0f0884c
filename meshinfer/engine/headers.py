"""What a model's files say they hold: safetensors headers, read and checked before MLX maps a byte.

The reading and checking is the store's (`models.tensors`); here it is asked of a whole model, each time
that it is opened: MLX believes what it reads, and files may have changed since the store took them in.
"""

from __future__ import annotations

from pathlib import Path

from meshinfer.base.errors import CorruptModel
from meshinfer.models.filenames import WEIGHTS_PATTERN
from meshinfer.models.tensors import check_index, read_tensor_headers


def checked_weight_files(directory: Path) -> tuple[Path, ...]:
    """The tensor files of the model in `directory`, sorted by name.

    Raises:
        CorruptModel: a file is missing, cut short or says what cannot be; it is named.
    """
    files = tuple(sorted(directory.glob(WEIGHTS_PATTERN)))
    check_index(directory, {file.name: [tensor.name for tensor in read_tensor_headers(file)] for file in files})
    if not files:
        raise CorruptModel(
            f"{directory} holds no tensors", expected=f"files named {WEIGHTS_PATTERN}", do="pull the model again"
        )
    return files
