"""The JSON objects among a model's files: config, index. Read whole, so bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from meshinfer.base.errors import CorruptModel

MAX_JSON_BYTES = 64 * 1024 * 1024
"""Of a config or an index; the largest index known (DeepSeek, 90 000 tensors) has 9 MB."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model's file.

    Raises:
        CorruptModel: it is missing, too large, or no JSON object.
    """
    again = "fetch this file again, or pull the model again"
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CorruptModel(f"{path} has {size} bytes", expected=f"at most {MAX_JSON_BYTES}", do=again)
        value: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CorruptModel(f"{path} is missing", expected="a model directory as mlx-lm writes it", do=again) from error
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not JSON ({error})", expected="a JSON object", do=again) from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} is not a JSON object", expected="a JSON object", do=again)
    return cast("dict[str, Any]", value)
